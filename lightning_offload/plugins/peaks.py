"""Peaks between steps: an optimizer's step above all, and what a device's allocator holds in reserve.

On CUDA the allocator counts; reading its statistics costs host time, so they are read around watched steps alone. On
a CPU the tensors that an optimizer's step makes are counted as those of a training step are, by a dispatch mode that
the optimizer's own hooks put on and take off.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)
from typing_extensions import override

from lightning_offload.capture.live import LiveBytes
from lightning_offload.tensors.op_facts import facts_of


class DevicePeaks:
    """Reads the allocator at the seams between steps, and counts in optimizers' steps where there is none.

    Attributes:
        optimizer_peak_bytes: The highest peak between a watched step and the one after it: the optimizer's.
        reserved_bytes: What the allocator held from the device then, in use or not.
    """

    def __init__(self) -> None:
        self.optimizer_peak_bytes: int | None = None
        self.reserved_bytes: int | None = None
        self._was_watched = False
        self._mode: _OptimizerMode | None = None
        self._thread = 0

    def begin_step(self, device: torch.device, *, is_watched: bool) -> None:
        """Note what came after the last watched step; start counting anew if the coming one is watched."""
        if device.type != "cuda":
            return
        if self._was_watched:
            self.note_optimizer(torch.cuda.max_memory_allocated(device))
            self.reserved_bytes = torch.cuda.memory_reserved(device)
        if is_watched:
            torch.cuda.reset_peak_memory_stats(device)
        self._was_watched = is_watched

    def end_scope(self, device: torch.device) -> int | None:
        """Peak since a watched step began; the optimizer's is counted from here on."""
        if device.type != "cuda":
            return None
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return peak

    def begin_optimizer(self, device: torch.device, there: Iterable[torch.UntypedStorage], more_bytes: int) -> None:
        """Count what an optimizer's step makes, on a device whose allocator does not.

        A hook has no part that an exception would run, so the mode goes under those of others: what they take off, on
        leaving, is their own.

        Args:
            device: Where it runs.
            there: What is there already.
            more_bytes: What is there and in no census.
        """
        self.end_optimizer(is_whole=False)
        self._mode, self._thread = _OptimizerMode(LiveBytes(device, there), more_bytes), threading.get_ident()
        _lay_under_all(self._mode)

    def end_optimizer(self, *, is_whole: bool) -> None:
        """Stop counting, if it was begun.

        Args:
            is_whole: Whether the optimizer's step has ended: not where it failed, or where a backward is inside.
        """
        if self._mode is None or self._thread != threading.get_ident():
            return  # it is on another thread's stack
        mode, self._mode = self._mode, None
        _take_off(mode)
        if is_whole:
            self.note_optimizer(mode.live.peak_bytes + mode.more_bytes)

    def note_optimizer(self, peak_bytes: int) -> None:
        """Take over the peak of an optimizer's step: the highest, since with accumulation not every step has one."""
        self.optimizer_peak_bytes = max(self.optimizer_peak_bytes or 0, peak_bytes)


def _lay_under_all(mode: TorchDispatchMode) -> None:
    """Put a mode under all of this thread's stack."""
    above = [_pop_mode() for _ in _get_current_dispatch_mode_stack()]
    for other in (mode, *reversed(above)):
        _push_mode(other)


def _take_off(mode: TorchDispatchMode) -> None:
    """Take a mode off this thread's stack, wherever it lies there."""
    if mode not in _get_current_dispatch_mode_stack():
        return
    above = []
    while (top := _pop_mode()) is not mode:
        above.append(top)
    for other in reversed(above):
        _push_mode(other)


class _OptimizerMode(TorchDispatchMode):
    """Counts what the ops inside make."""

    def __init__(self, live: LiveBytes, more_bytes: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = live
        self.more_bytes = more_bytes

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self.live.on_op(facts_of(func), args, kwargs, out, 0.0)
        return out

    @classmethod
    @override
    def is_infra_mode(cls) -> bool:
        return True

    @classmethod
    @override
    def ignore_compile_internals(cls) -> bool:
        return True
