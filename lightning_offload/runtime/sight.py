"""How the ops of a step are seen: by the native core, or by a dispatch mode where there is no core.

The core sees by a dispatch key below autograd. No mode is on while kernels and formulas of autograd run, so they
compute as they do plainly: what Note [modes change backward] says of modes does not hold there.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch

from lightning_offload.accelerators import kind_of
from lightning_offload.errors import OffloadError
from lightning_offload.runtime import native
from lightning_offload.runtime.hooks import Dispatch, Made, StepMode, mode_off, watch_backward
from lightning_offload.runtime.write_barrier import count_minding
from lightning_offload.tensors import compiled_code, custom_ops
from lightning_offload.tensors.op_facts import CONVOLUTION, facts_of


def core_on(device: torch.device) -> ModuleType | None:
    """The native core, where it sees what ops of a device run now; None where a mode must.

    Raises:
        UnsupportedError: ``LIGHTNING_OFFLOAD_ENGINE`` is "native", and there is no core.
    """
    if _why_by_mode(device):
        return None
    core = native.load()
    if core is None:
        return None
    with native.once:
        return core if not _why_deaf(core) else None


def engine_on(device: torch.device) -> str:
    """What planned steps on a device run in, for reports: "native", or "python: " and why. Builds nothing."""
    why = _why_by_mode(device) or native.why_python()
    return f"python: {why}" if why else "native"


def _why_by_mode(device: torch.device) -> str:
    """Why a mode must see the ops of a device; "" where the core can."""
    if not kind_of(device).runs_core:
        return f"the native core was never tried on {device.type!r}"
    if torch._C._get_dispatch_mode(_FAKE) is not None:
        return "tensors are fake"
    if compiled_code.may_run():
        # Compiled code is guarded by the dispatch keys that are on: it would be compiled once more for ours.
        return "torch.compile is in use"
    return ""


_FAKE = torch._C._TorchDispatchModeKey.FAKE
_KEY = "Fake"
"""The core's dispatch key, by torch's name for it."""


@functools.cache
def _why_deaf(core: ModuleType) -> str:
    """Why the core sees no ops; "" where it does, from now on."""
    why: str = core.install(_facts, OffloadError)
    if why:
        native.give_up(why)
    else:
        _pass_operators_of_higher_order()
        count_minding(core.count_minding)
        custom_ops.on_change(core.forget_facts)
    return why


def _pass_operators_of_higher_order() -> None:
    """Have the core see what operators of higher order call: they go by Python's own dispatch, which lacks its key."""
    key = torch._C._dispatch_key_parse(_KEY)
    default: list[Any] = torch._ops._HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS
    if key not in default:
        default.append(key)  # for those that are yet to be made
        for operator in list(torch._ops._higher_order_ops.values()):
            operator.fallthrough(key)


def _facts(name: str, overload: str) -> tuple[Any, ...]:
    """What the core knows of an op, by its qualified name and overload; see ``OpFacts`` in ``state.h``."""
    namespace, _, base = name.partition("::")
    func = getattr(getattr(getattr(torch.ops, namespace), base, None), overload or "default", None)
    if func is None:
        unknown = f"{namespace}.{base}.{overload or 'default'}"
        return (unknown, False, False, False, False, True, True, False, True, (), (), ())
    facts = facts_of(func)
    return (
        facts.name, facts.replayable, facts.replayable_on_cuda, facts.name == CONVOLUTION, facts.is_random,
        facts.mutates, facts.writes_all, facts.overwrites, facts.may_multiply,
        tuple(position for position, _ in facts.writes), facts.running_stats, facts.read_stats,
    )  # fmt: skip


@contextlib.contextmanager
def seeing_ops(device: torch.device, dispatch: Dispatch, made: Made, *, by_mode: bool = False) -> Iterator[None]:
    """Inside, the ops of this thread go through a dispatch function.

    Args:
        device: Where they run.
        dispatch: Runs an op.
        made: Called with what autograd makes out of its sight.
        by_mode: Whether a mode must see them.
    """
    seeing = seeing_calls(device, dispatch, made, by_mode=by_mode)
    if not isinstance(seeing, StepMode):
        with seeing:
            yield
        return
    end = watch_backward(contextlib.nullcontext)  # Note [modes change backward]
    try:
        with seeing:
            yield
    finally:
        end()


def seeing_calls(
    device: torch.device, dispatch: Dispatch, made: Made, *, by_mode: bool = False
) -> contextlib.AbstractContextManager[Any]:
    """The same around a call that runs no backward; also within one whose own ops nobody sees."""
    core = core_on(device) if not by_mode else None
    return _watching(core.Watch(StepMode(dispatch))) if core is not None else StepMode(dispatch, made)


@contextlib.contextmanager
def _watching(watch: Any) -> Iterator[None]:
    watch.enter()
    try:
        yield
    finally:
        watch.leave()


@contextlib.contextmanager
def unseen(device: torch.device) -> Iterator[None]:
    """Inside, nobody sees the ops of this thread: around a backward that need not be seen."""
    core = native.load() if native.is_loaded() and kind_of(device).runs_core else None
    with mode_off():
        if core is None:
            yield
            return
        core.hide()
        try:
            yield
        finally:
            core.show()
