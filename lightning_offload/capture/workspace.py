"""Device memory that ops need while they run: read off the allocator's peak around each op, or off its reports.

Note [the peak is reset for each op]: the allocator knows one peak at a time, so measuring an op's destroys the
step's. :class:`OpMemory` reads it before each reset and keeps the running maximum, which is the step's true peak.
Anybody who reads the allocator's own peak in such a step reads that of what came after the last op.

Note [trial runs]: with ``torch.backends.cudnn.benchmark`` the first call of a convolution tries several algorithms,
some of which need memory that the one chosen will not. The step that is recorded is often the first, so its
figures for convolutions are not taken then; a later step gives them (:class:`~.timing.OpTimes`).

Memory is counted when the host asks for it, so nothing here waits for the device. It is what the allocator hands
out: sizes are rounded up, and a large block may be handed out whole.

Note [a CPU's reports]: a CPU's allocator counts nothing, but tells a profiler of each block that it gives and takes
back, in the thread that asks. So each op runs under torch's old profiler, which keeps events and writes nothing; that
takes 30 microseconds an op, and about one for each op inside, so a step whose ops are timed goes without. oneDNN asks
the same allocator for its scratchpads. Less than a page does not count: many ops make a number or two for themselves.
What a kernel takes from the system by itself is not told, nor is anything while the user's own profiler is on, since
there can be only one in a thread.
"""

from __future__ import annotations

import abc
import functools
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from typing_extensions import override

from lightning_offload.accelerators import indexed, kind_of, memory_of

_PAGE_BYTES = 4096  # less is the bookkeeping of an op


class MemoryStats(Protocol):
    """A device's allocator as far as ops' memory is read off it."""

    def read(self) -> tuple[int, int]:
        """Bytes allocated now, and at most since the last reset."""

    def reset_peak(self) -> None:
        """Let the peak be what is allocated now."""


class Workspaces(abc.ABC):
    """Measures the workspace of each op, in whichever thread it runs."""

    @abc.abstractmethod
    def before_op(self) -> None:
        """An op is about to run in this thread."""

    @abc.abstractmethod
    def after_op(self) -> int:
        """The op has run.

        Returns:
            Its workspace: the most that was allocated in it, beyond what was before and what is left of it now. So
            neither outputs count, nor memory that a library keeps from its first call on.
        """

    def op_failed(self) -> None:  # noqa: B027  (where nothing was begun)
        """The op raised an error."""


class OpMemory(Workspaces):
    """Measures the workspace of each op by an allocator that counts.

    Args:
        stats: The device's allocator.
    """

    def __init__(self, stats: MemoryStats) -> None:
        self._stats = stats
        self._peak_bytes = 0
        self._open = _BeforeOp()

    @property
    def peak_bytes(self) -> int:
        """The most that was allocated at once since before the first op, up to now."""
        return max(self._peak_bytes, self._stats.read()[1])

    @override
    def before_op(self) -> None:
        self._open.before_bytes, peak = self._stats.read()
        self._peak_bytes = max(self._peak_bytes, peak)
        self._stats.reset_peak()

    @override
    def after_op(self) -> int:
        before, self._open.before_bytes = self._open.before_bytes, None
        after, peak = self._stats.read()
        self._peak_bytes = max(self._peak_bytes, peak)
        return 0 if before is None else max(0, peak - max(before, after))


class _BeforeOp(threading.local):
    """What was allocated before the op that a thread runs: autograd has a thread for each device."""

    before_bytes: int | None = None


class _Profiler(NamedTuple):
    """What there is of torch's old profiler."""

    is_on: Callable[[], bool]
    begin: Callable[[], None]
    end: Callable[[], list[list[Any]]]


@functools.cache
def _profiler() -> _Profiler | None:
    try:
        from torch._C import _autograd, _profiler  # no part of torch's interface
    except ImportError:
        return None
    try:
        config = _profiler.ProfilerConfig(
            _profiler.ProfilerState.CPU, False, True, False, False, False, _profiler._ExperimentalConfig()
        )
        begin = functools.partial(_autograd._enable_profiler_legacy, config)
        return _Profiler(_autograd._profiler_enabled, begin, _autograd._disable_profiler_legacy)
    except (AttributeError, TypeError):
        return None


class ReportedMemory(Workspaces):
    """Measures the workspace of each op by what a CPU's allocator reports: Note [a CPU's reports].

    Args:
        profiler: Takes the reports.
    """

    def __init__(self, profiler: _Profiler) -> None:
        self._profiler = profiler
        self._open = _Profiled()

    @override
    def before_op(self) -> None:
        if not self._profiler.is_on():
            self._profiler.begin()
            self._open.is_ours = True

    @override
    def after_op(self) -> int:
        if not self._open.is_ours:
            return 0
        self._open.is_ours = False
        now = peak = 0
        for events in self._profiler.end():
            for event in events:
                if event.kind() == "memory_alloc":
                    now += event.cpu_memory_usage()
                    peak = max(peak, now)
        num_bytes = peak - max(0, now)
        return num_bytes if num_bytes >= _PAGE_BYTES else 0

    @override
    def op_failed(self) -> None:
        self.after_op()


class _Profiled(threading.local):
    """Whether the op that a thread runs does so under the profiler."""

    is_ours = False


def tries_algorithms(name: str) -> bool:
    """Whether an op may have been a trial run: Note [trial runs]."""
    return torch.backends.cudnn.benchmark and "convolution" in name


def workspaces_on(device: torch.device) -> Workspaces | None:
    """Measures ops' workspaces on a device; None where neither its allocator nor its host tells."""
    memory = op_memory_for(device)
    if memory is not None or kind_of(indexed(device)).type != "cpu":
        return memory
    profiler = _profiler()
    return ReportedMemory(profiler) if profiler is not None else None


def op_memory_for(device: torch.device) -> OpMemory | None:
    """Measures ops' workspaces by a device's allocator; None where that does not count."""
    stats = memory_of(indexed(device))
    return OpMemory(stats) if stats is not None else None
