"""Device memory that ops need while they run, read off the allocator's peak around each op.

Note [the peak is reset for each op]: the allocator knows one peak at a time, so measuring an op's destroys the
step's. :class:`OpMemory` reads it before each reset and keeps the running maximum, which is the step's true peak.
Anybody who reads the allocator's own peak in such a step reads that of what came after the last op.

Note [trial runs]: with ``torch.backends.cudnn.benchmark`` the first call of a convolution tries several algorithms,
some of which need memory that the one chosen will not. The step that is recorded is often the first, so its
figures for convolutions are not taken then; a later step gives them (:class:`~.timing.OpTimes`).

Memory is counted when the host asks for it, so nothing here waits for the device. It is what the allocator hands
out: sizes are rounded up, and a large block may be handed out whole.
"""

from __future__ import annotations

import threading
from typing import Protocol

import torch

from lightning_offload.accelerators import memory_of
from lightning_offload.capture.placement import indexed


class MemoryStats(Protocol):
    """A device's allocator as far as ops' memory is read off it."""

    def read(self) -> tuple[int, int]:
        """Bytes allocated now, and at most since the last reset."""

    def reset_peak(self) -> None:
        """Let the peak be what is allocated now."""


class OpMemory:
    """Measures the workspace of each op.

    Args:
        stats: The device's allocator.

    Attributes:
        allocated_bytes: What was allocated on the device after the last op.
    """

    def __init__(self, stats: MemoryStats) -> None:
        self.allocated_bytes = 0
        self._stats = stats
        self._peak_bytes = 0
        self._open = _BeforeOp()

    @property
    def peak_bytes(self) -> int:
        """The most that was allocated at once since before the first op, up to now."""
        return max(self._peak_bytes, self._stats.read()[1])

    def before_op(self) -> None:
        """An op is about to run in this thread."""
        self._open.before_bytes, peak = self._stats.read()
        self._peak_bytes = max(self._peak_bytes, peak)
        self._stats.reset_peak()

    def after_op(self) -> int:
        """The op has run.

        Returns:
            Its workspace: the most that was allocated in it, beyond what was before and what is left of it now. So
            neither outputs count, nor memory that a library keeps from its first call on.
        """
        before, self._open.before_bytes = self._open.before_bytes, None
        self.allocated_bytes, peak = self._stats.read()
        self._peak_bytes = max(self._peak_bytes, peak)
        return 0 if before is None else max(0, peak - max(before, self.allocated_bytes))


class _BeforeOp(threading.local):
    """What was allocated before the op that a thread runs: autograd has a thread for each device."""

    before_bytes: int | None = None


def tries_algorithms(name: str) -> bool:
    """Whether an op may have been a trial run: Note [trial runs]."""
    return torch.backends.cudnn.benchmark and "convolution" in name


def op_memory_for(device: torch.device) -> OpMemory | None:
    """Measures ops' workspaces on a device; None where its allocator does not tell."""
    stats = memory_of(indexed(device))
    return OpMemory(stats) if stats is not None else None
