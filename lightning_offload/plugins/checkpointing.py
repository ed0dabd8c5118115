"""Regions that a program checkpoints by ``torch.utils.checkpoint``: counted, and run as if they were not if asked to.

What a region saves within is torch's own to recompute, and its backward makes all of it again at once, so no plan
lowers what that needs. Run as if it were not checkpointed, the region saves what any code does, and the plan keeps,
swaps or recomputes each of it.

All ways lead through two functions of torch: frameworks' ``gradient_checkpointing_enable``, wrappers of modules,
``checkpoint_sequential``, reentrant or not, selective or not. Of a selective region its contexts are left out, too: the
planner decides what is saved.

Tensors that the model holds itself, under saved-tensor hooks of its own or in a selective region's cache, are counted
too, and told of once: no plan can move them.

Shortfalls: checkpointing of others' own making (DeepSpeed's, Megatron's) is not known of, nor is what a compiled region
checkpoints, which is the compiler's.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections.abc import Callable, Generator, Iterator
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor

from lightning_offload.runtime.nested_hooks import SELECTIVE, NestedSaves, noticing
from lightning_offload.units import format_bytes

__all__ = ["Checkpointing", "NestedHooks", "is_run_again"]

_log = logging.getLogger(__name__)
_NON_REENTRANT = "_checkpoint_without_reentrant_generator"
_IMPORTERS = ("torch.utils.checkpoint", "torch.distributed._composable.checkpoint_activation")
_lock = threading.Lock()
_num_watching = 0
_undo = contextlib.ExitStack()


class _Open(threading.local):
    def __init__(self) -> None:
        self.of: list[Checkpointing] = []
        self.num_regions = 0  # that are checkpointed, and not over


_open = _Open()


def is_run_again() -> bool:
    """Whether what runs in this thread is part of a region that backward runs again, the first time or then."""
    return _open.num_regions > 0 or torch._C._current_graph_task_id() != -1


class Checkpointing:
    """The checkpointed regions of a plugin's steps.

    Args:
        is_replaced: Whether they run as if they were not checkpointed.

    Attributes:
        num_regions: How many the last step had that had any, as far as it ran.
    """

    def __init__(self, *, is_replaced: bool) -> None:
        self.is_replaced = is_replaced
        self.num_regions = 0
        self._is_new = False

    def begin_step(self) -> None:
        """Another step begins: its regions are counted anew."""
        self._is_new = True

    def note_region(self) -> None:
        """One begins."""
        if self._is_new:
            self.num_regions, self._is_new = 0, False
        self.num_regions += 1

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """Around each forward of a step, in the thread that runs it."""
        if not _open.of:
            _open.num_regions = 0  # an exception may keep regions open that it has ended
        _open.of.append(self)
        try:
            yield
        finally:
            _open.of.pop()

    @property
    def advice(self) -> str:
        """What to tell where a budget is too small; "" where nothing was checkpointed, or all of it is replaced."""
        if self.is_replaced or not self.num_regions:
            return ""
        are = "region of it is" if self.num_regions == 1 else "regions of it are"
        return (
            f"{self.num_regions} {are} checkpointed by the model itself, and what they make again in backward is in no "
            "plan: replace_checkpointing=True runs them as if they were not, and plans what they save, mostly with a "
            "lower floor"
        )


def _replaces() -> bool:
    """Note that a region begins in this thread; whether it is to run as if it were not checkpointed."""
    if not _open.of or not torch.is_grad_enabled() or torch.compiler.is_compiling() or is_run_again():
        return False
    _open.of[-1].note_region()
    return _open.of[-1].is_replaced


def watch_regions() -> Callable[[], None]:
    """Hear of regions that begin while a step is open; each call has to be ended.

    Returns:
        What ends it.
    """
    global _num_watching
    with _lock:
        _num_watching += 1
        if _num_watching == 1:
            _install()
    return _end


def _end() -> None:
    global _num_watching
    with _lock:
        _num_watching -= 1
        if not _num_watching:
            _undo.close()


def _install() -> None:
    plain_generator = getattr(torch.utils.checkpoint, _NON_REENTRANT)
    reentrant = torch.utils.checkpoint.CheckpointFunction

    def non_reentrant(*args: Any, **kwargs: Any) -> Generator[None, None, None]:
        return _nothing_around() if _replaces() else _counted(plain_generator(*args, **kwargs))

    def apply(cls: Any, function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        if cls is reentrant and _replaces():
            return function(*args)
        return super(reentrant, cls).apply(function, preserve_rng_state, *args)

    for name in _IMPORTERS:
        module = sys.modules.get(name)
        if module is not None and getattr(module, _NON_REENTRANT, None) is plain_generator:
            setattr(module, _NON_REENTRANT, non_reentrant)
            _undo.callback(setattr, module, _NON_REENTRANT, plain_generator)
    reentrant.apply = classmethod(apply)  # type: ignore[method-assign,assignment]
    _undo.callback(delattr, reentrant, "apply")


def _nothing_around() -> Generator[None, None, None]:
    yield


def _counted(region: Generator[None, None, None]) -> Generator[None, None, None]:
    _open.num_regions += 1
    try:
        yield from region
    finally:
        _open.num_regions -= 1


class NestedHooks:
    """Counts, in each step, what its hooks do not see.

    Attributes:
        last: What was counted in the last step.
    """

    def __init__(self) -> None:
        self.last = NestedSaves()
        self._told: set[str] = set()

    @contextlib.contextmanager
    def around(self, pack: Callable[[Tensor], Any]) -> Iterator[None]:
        """Around the part of a step that is under its hooks, of which ``pack`` is the first."""
        self.last = nested = NestedSaves()
        with noticing(nested, pack):
            yield
        for holder in nested.num_tensors.keys() - self._told:
            self._told.add(holder)
            _log.warning("%s", _said(holder, nested.num_tensors[holder], nested.num_bytes[holder]))


def _said(holder: str, num_tensors: int, num_bytes: int) -> str:
    tensors = f"{num_tensors} tensors" if num_tensors > 1 else "1 tensor"
    size = format_bytes(num_bytes)
    if holder == SELECTIVE:
        return (
            f"selective checkpointing in the model caches {tensors} ({size}) beside autograd, where no plan can move "
            "them: they stay on the device, and count as such; to have them planned give "
            "replace_checkpointing=True, train without the model's own checkpointing, or use torch 2.14 or later with "
            "checkpoint(..., respect_saved_tensors_hooks=True)"
        )
    return (
        f"the model saves {tensors} ({size}) under saved-tensor hooks of its own ({holder}), which are inside of the "
        "memory plugin's: they go where those hooks put them, and no plan can move them; to have them planned turn the "
        "model's own offloading off (activation_checkpointing_enable(offload=False) in transformers, no save_on_cpu)"
    )
