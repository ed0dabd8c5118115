"""Replays recorded calls: the exact way to have a value again that was dropped.

A replay runs the calls that lead to a value, in order, from what is still at hand. It runs with autocast and our
dispatch mode off, under the settings and from the generator's state of the original call, both restored afterwards,
and with batch norm's running statistics left out. A call that writes in place gets a copy of the whole storage of every
argument it writes, unless that storage is the replay's own and has no other reader. A call that makes something of
another size or number than it did is an error, as is one that raises.

Note [Rehearsals]: a replay is tried before the original is given up by replaying, from what will still be at hand then,
all that will not be: every value that has a call and no memory of its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from lightning_offload.accelerators import generator_of
from lightning_offload.errors import OffloadError, ReplayError
from lightning_offload.runtime import kernel_keys
from lightning_offload.runtime.environment import Environment
from lightning_offload.runtime.lanes import storage_bytes
from lightning_offload.runtime.values import Blank, Call, LiveValue, Ref
from lightning_offload.tensors.geometry import Geometry
from lightning_offload.tensors.op_facts import OpFacts, effects, tensors_in

Have = Callable[[LiveValue], torch.UntypedStorage]
Notice = Callable[[torch.UntypedStorage], None]
Keep = Callable[[LiveValue, torch.UntypedStorage], None]


class Unrecordable(Exception):
    """A call reads something that a replay could not have."""


def record_call(
    func: Any,
    facts: OpFacts,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    value_of: Callable[[Tensor], LiveValue],
    *,
    device: torch.device,
    environment: Environment,
) -> Call:
    """Record a call that is about to run.

    Args:
        func: The overload.
        facts: Facts about it.
        args: Positional arguments.
        kwargs: Keyword arguments.
        value_of: Gives the value that a tensor among the arguments holds now, or raises ``Unrecordable``.
        device: Where it runs.
        environment: The settings that it runs under.
    """
    args = facts.replayed_args(args)
    inputs: dict[LiveValue, None] = {}
    generator = _generator(args, kwargs) if facts.is_random else None
    blank = facts.made_anew(args)
    first = () if blank is None else (Blank(blank.untyped_storage().nbytes(), Geometry.of(blank)),)
    return Call(
        func=func,
        facts=facts,
        args=(*first, *[_freeze(item, value_of, inputs) for item in (args[1:] if first else args)]),
        kwargs={name: _freeze(item, value_of, inputs) for name, item in kwargs.items()} if kwargs else {},
        inputs=tuple(inputs),
        device=device,
        environment=environment,
        generator=(generator, generator.get_state()) if generator is not None else None,
    )


def _freeze(item: Any, value_of: Callable[[Tensor], LiveValue], inputs: dict[LiveValue, None]) -> Any:
    if isinstance(item, Tensor):
        value = value_of(item)
        inputs[value] = None
        return Ref(value, Geometry.of(item))
    if isinstance(item, (list, tuple)):
        return type(item)([_freeze(part, value_of, inputs) for part in item])
    return item


def _thaw(item: Any, storage_of: dict[LiveValue, torch.UntypedStorage], notice: Notice) -> Any:
    if isinstance(item, Ref):
        return item.geometry.view(storage_of[item.value])
    if isinstance(item, Blank):
        return item.geometry.view(_memory(item.num_bytes, item.geometry.device, notice))
    if isinstance(item, (list, tuple)):
        return type(item)([_thaw(part, storage_of, notice) for part in item])
    return item


def _memory(num_bytes: int, device: torch.device, notice: Notice) -> torch.UntypedStorage:
    storage = torch.empty(num_bytes, dtype=torch.uint8, device=device).untyped_storage()
    notice(storage)
    return storage


def _generator(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Generator:
    """The generator that a random call draws from: its argument, else the default one of its device."""
    for item in (*args, *kwargs.values()):
        if isinstance(item, torch.Generator):
            return item
    device = next((tensor.device for tensor in tensors_in((args, kwargs))), None)
    if device is None:
        device = torch.device(kwargs.get("device") or "cpu")
    return generator_of(device)


def chain_to(value: LiveValue, must_replay: Callable[[LiveValue], bool]) -> list[Call]:
    """The calls to replay for a value, in order; depth first from what is at hand."""
    order: list[Call] = []
    done: set[Call] = set()
    stack: list[tuple[LiveValue, bool]] = [(value, False)]
    while stack:
        current, expanded = stack.pop()
        call = current.call
        if call is None or call in done:
            continue
        if expanded:
            done.add(call)
            order.append(call)
            continue
        stack.append((current, True))
        stack.extend((v, False) for v in reversed(call.inputs) if must_replay(v))
    return order


def _is_gone(value: LiveValue) -> bool:
    return value.block is None and (value.live() is None or value.is_stale)


def _may_be_gone(value: LiveValue) -> bool:
    return value.call is not None and value.block is None and value.storage is None


@dataclasses.dataclass(frozen=True, slots=True)
class Replay:
    """Makes values again by replaying the calls that made them, under the settings that those ran under.

    Attributes:
        have: Provides a value that need not be replayed.
        notice: Told of every storage that a replay allocates.
        keep: Told of every value made on the way to another, and its memory; may let it stay resident.
        is_rehearsal: Whether to replay what is still at hand and will not be, and to keep nothing.
    """

    have: Have
    notice: Notice
    keep: Keep
    is_rehearsal: bool = False

    def make(self, value: LiveValue) -> torch.UntypedStorage:
        """Make a value again.

        Args:
            value: What is wanted; it has a call, and no memory.

        Returns:
            Device memory with the value, owned by nobody yet.

        Raises:
            ReplayError: The value cannot be made again, or came out otherwise.
            StaleInputError: What a call reads was written since.
        """
        calls = chain_to(value, _may_be_gone if self.is_rehearsal else _is_gone)
        if not calls:
            raise ReplayError("a saved tensor was to be recomputed but its producer was not recorded in this step")
        readers = Counter(v for call in calls for v in call.inputs)
        readers[value] += 1
        own: dict[LiveValue, torch.UntypedStorage] = {}
        before = current = calls[0].environment.now()
        try:
            with torch._C._DisableAutocast():
                for call in calls:
                    if call.environment is not current:
                        call.environment.put(current)
                        current = call.environment
                    self._run(call, own, readers)
        finally:
            if current is not before:
                before.put(current)
        storage = own.get(value)
        if storage is None:
            storage = value.storage
        if storage is None:
            raise ReplayError(f"{calls[-1].facts.name} did not give on replay what it gave at first")
        return storage

    def _run(self, call: Call, own: dict[LiveValue, torch.UntypedStorage], readers: Counter[LiveValue]) -> None:
        storage_of = {v: own[v] if v in own else self.have(v) for v in call.inputs}
        for v in call.inputs:
            readers[v] -= 1
        _copy_written(call, storage_of, own, readers, self.notice)
        args = tuple([_thaw(item, storage_of, self.notice) for item in call.args])
        kwargs = call.kwargs and {name: _thaw(item, storage_of, self.notice) for name, item in call.kwargs.items()}
        for v in call.inputs:
            if readers[v] == 0:
                own.pop(v, None)
        made = self._made_by(call, args, kwargs)
        for position, reference in call.results.items():
            result = reference()
            if result is None or not (self.is_rehearsal or result.live() is None or result.is_stale):
                continue
            storage = made[position] if position < len(made) else None
            if storage is None or storage.nbytes() != result.num_bytes:
                size = "nothing" if storage is None else f"{storage.nbytes()} bytes"
                raise ReplayError(f"{call.facts.name} gave {size} on replay in place of {result.num_bytes} bytes")
            if not self.is_rehearsal:
                self.keep(result, storage)
            if readers[result] > 0:
                own[result] = storage

    def _made_by(self, call: Call, args: Any, kwargs: Any) -> list[torch.UntypedStorage]:
        """Run a call; what it makes on its device, in order. Numbers that it gives elsewhere are not asked for."""
        try:
            if call.generator is None:
                out = kernel_keys.call(call.func, args, kwargs)
            else:
                with _generator_state(*call.generator):
                    out = kernel_keys.call(call.func, args, kwargs)
        except (OffloadError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise ReplayError(f"{call.facts.name} could not be run again: {error}") from error
        did = effects(call.facts, args, kwargs, out)
        made: list[torch.UntypedStorage] = []
        for position, (tensor, storage) in enumerate(zip(did.made, did.made_on, strict=True)):
            if tensor.device == call.device:
                made.append(storage)
                if position < did.num_fresh:
                    self.notice(storage)
        return made


def _copy_written(
    call: Call,
    storage_of: dict[LiveValue, torch.UntypedStorage],
    own: dict[LiveValue, torch.UntypedStorage],
    readers: Counter[LiveValue],
    notice: Notice,
) -> None:
    """Give a call its own copy of each storage that it writes."""
    if not call.facts.mutates:
        return
    for v in {ref.value for ref in _written_refs(call)}:
        if v in own and readers[v] == 0 and v.live() is None:
            continue
        original = storage_of[v]
        copy = storage_of[v] = _memory(original.nbytes(), original.device, notice)
        storage_bytes(copy).copy_(storage_bytes(original))


def _written_refs(call: Call) -> Iterator[Ref]:
    found: list[Any] = []
    for position, name in call.facts.writes:
        found.append(call.args[position] if position < len(call.args) else call.kwargs.get(name))
    while found:
        item = found.pop()
        if isinstance(item, Ref):
            yield item
        elif isinstance(item, (list, tuple)):
            found.extend(item)


@contextlib.contextmanager
def _generator_state(generator: torch.Generator, state: Tensor) -> Iterator[None]:
    current = generator.get_state()
    generator.set_state(state)
    try:
        yield
    finally:
        generator.set_state(current)
