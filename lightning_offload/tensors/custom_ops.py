"""Ops from outside torch's own namespaces: what their schemas declare, as far as recorded steps saw them keep to it.

A kernel of somebody's own says by its schema what it writes. Most say the truth, some do not: they update statistics,
fill caches, talk to other ranks. So a schema is *believed* once calls were watched that kept to it, and from then on
the op is one like others. Until then, and where one was seen to break it, such an op may write all that it is given,
and is not run again. Who watches is :mod:`lightning_offload.capture.witness`.

What is learned holds for the process, by qualified name and schema; checkpoints hand it on with the plans that count on
it. It gets worse, never better: an op that was seen to break its schema once is not believed any more.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

_NEVER = frozenset(
    {
        "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "c10d", "c10d_functional", "debugprims", "dist",
        "fsdp", "inductor", "profiler", "rngprims", "rpc", "symm_mem",
    }
)  # fmt: skip
"""Namespaces of ops that talk to other ranks, or do something beside what they return."""


class Standing(NamedTuple):
    """What is held of an op.

    Attributes:
        keeps_to_writes: Whether it writes what it declares, and returns memory of its own.
        may_replay: Whether it may be run again.
        why: What was seen, where either does not hold; else "".
    """

    keeps_to_writes: bool
    may_replay: bool
    why: str = ""

    def and_seen(self, other: Standing) -> Standing:
        """What is held after it was seen otherwise, too: the worse of both."""
        keeps_to_writes = self.keeps_to_writes and other.keeps_to_writes
        return Standing(keeps_to_writes, self.may_replay and other.may_replay, self.why or other.why)


BELIEVED = Standing(keeps_to_writes=True, may_replay=True)

_standings: dict[str, Standing] = {}
_demoted: list[str] = []
_listeners: list[Callable[[], object]] = []


def identity_of(func: torch._ops.OpOverload) -> str:
    """What an op is known by: its qualified name with its schema."""
    return str(func._schema)


def may_be_believed(func: torch._ops.OpOverload) -> bool:
    """Whether watching an op's calls can show that it keeps to its schema.

    Not where it talks to other ranks, nor where it is given objects with a state of their own, nor where its author
    has registered that it has side effects.
    """
    if func.namespace in _NEVER or _is_effectful(func):
        return False
    for argument in func._schema.arguments:
        kind = argument.type.kind()
        if kind == "ClassType" or (kind in ("StringType", "OptionalType") and "group" in argument.name):
            return False
    return True


def _is_effectful(func: torch._ops.OpOverload) -> bool:
    try:
        from torch._higher_order_ops.effects import _get_effect
    except ImportError:  # private: where it is gone, nothing is registered by this way
        return False
    return _get_effect(func) is not None


def standing_of(identity: str) -> Standing | None:
    """What is held of an op; None of one that nobody has watched."""
    return _standings.get(identity)


def is_watched(identity: str) -> bool:
    """Whether calls of an op may still show something: not once it was seen to break its schema."""
    standing = _standings.get(identity)
    return standing is None or standing.keeps_to_writes


def learn(seen: Mapping[str, Standing]) -> bool:
    """Take over what watched calls have shown.

    Args:
        seen: By identity.

    Returns:
        Whether any op is believed that was not, or the other way round.
    """
    has_changed = False
    for identity, standing in seen.items():
        before = _standings.get(identity)
        now = before.and_seen(standing) if before is not None else standing
        _standings[identity] = now
        if now[:2] != (before[:2] if before is not None else (False, False)):
            has_changed = True
            if before is not None:
                _demoted.append(_as_python_says(identity.partition("(")[0]))
    if has_changed:
        for tell in _listeners:
            tell()
    return has_changed


def demoted() -> Sequence[str]:
    """The names of ops that were believed and are not any more, in the order in which that showed."""
    return _demoted


def on_change(tell: Callable[[], object]) -> None:
    """Have a function called whenever anything is held otherwise."""
    _listeners.append(tell)


def known() -> Iterator[tuple[str, Standing]]:
    """What is held of all ops that were watched, by identity."""
    return iter(sorted(_standings.items()))


def not_believed(names: Collection[str]) -> dict[str, str]:
    """Why ops may not be run again or not be trusted with what they are given, by name, of those with these names."""
    found = {identity.partition("(")[0]: standing.why for identity, standing in known() if standing.why}
    by_name = {_as_python_says(name): why for name, why in found.items()}
    return {name: by_name[name] for name in sorted(by_name.keys() & set(names))}


def _as_python_says(name: str) -> str:
    """``ns::op.overload`` as :class:`torch._ops.OpOverload` prints it: ``ns.op.overload``."""
    name = name.replace("::", ".")
    return name if name.count(".") > 1 else f"{name}.default"


def forget() -> None:
    """Hold nothing of any op, as in a new process: for tests."""
    _standings.clear()
    _demoted.clear()
    for tell in _listeners:
        tell()


def to_rows() -> list[dict[str, Any]]:
    """What is held, as JSON-able data."""
    return [{"op": identity, **standing._asdict()} for identity, standing in known()]


def from_rows(rows: Any) -> dict[str, Standing]:
    """What :func:`to_rows` gave.

    Raises:
        ValueError: It is something else.
    """
    found = {}
    unsound: list[Any] = [None]
    for row in rows if isinstance(rows, list) else unsound:
        try:
            standing = Standing(row["keeps_to_writes"], row["may_replay"], row["why"])
            identity = row["op"]
        except (KeyError, TypeError) as error:
            raise ValueError(f"what is known of custom ops is malformed: {error!r}") from None
        is_sound = isinstance(identity, str) and isinstance(standing.why, str)
        if not (is_sound and isinstance(standing[0], bool) and isinstance(standing[1], bool)):
            raise ValueError(f"what is known of custom ops is malformed: {str(row)[:80]!r}")
        found[identity] = standing
    return found
