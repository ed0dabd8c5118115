"""Measures the ops of a step: by the host's clock on a CPU, by events of the device on an accelerator.

Protocol of an :class:`OpClock`: ``before_op`` and ``after_op`` around each op, in the thread that runs it;
``resolve`` at the end. An accelerator runs ops long after the host has launched them, so its clock marks the
stream before and after each op and reads the marks once the device has reached them. What lies between two ops
(waits for copies above all) is in no op's duration.

Note [starved devices]: a device that waits for the host reaches the mark before an op long before the op, so what lies
between the op's marks is its launch as well. Recordings and measured steps take the host longer than others do, and to
most ops of a net in half precision that adds several times what they take: on an H200, 273 ms instead of 66 for a step
of GPT-2 medium. So whenever the device is about to run out of ops it is held for some milliseconds, in which the host
gets ahead of it: ops then run back to back, as in a step that nothing watches. Where it cannot be held, or where the
program waits for it again and again, a starved op shows by the gap between it and the op before; what an op takes that
does next to nothing is subtracted from it.

Marks take the device a microsecond or two: what lies between two that follow each other is subtracted from all others.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import _disable_current_modes
from typing_extensions import override

from lightning_offload.accelerators import hold, indexed, is_capturing, kind_of
from lightning_offload.capture.workspace import OpMemory
from lightning_offload.graph.step_graph import StepGraph
from lightning_offload.tensors.observer import StepObserver
from lightning_offload.tensors.op_facts import Effects, OpFacts

_GAP_SECONDS = 5e-6  # between two ops; a device that is behind the host has a microsecond or two between marks
_LEAST_SECONDS = 1e-6  # of an op
_NUM_LAUNCHES = 15  # of nothing, whose median is the least time between two marks
_HOLD_SECONDS = 0.01  # the device waits for so long, while the host gets ahead of it
_HOLD_AGAIN_SECONDS = 0.008  # before the last one is over
_NUM_AHEAD = 128  # ops that the device has yet to do, or it may run out of them; a queue has room for 1,024 launches
_FEW, _MAX_WASTED = 64, 8  # holds after so few ops, at the end of which the device is idle all the same


class OpClock(abc.ABC):
    """Times the ops of one step."""

    @abc.abstractmethod
    def before_op(self) -> None:
        """An op is about to run in this thread."""

    @abc.abstractmethod
    def after_op(self, host_seconds: float) -> None:
        """The op has run; on an accelerator it has been launched, which took ``host_seconds``."""

    @abc.abstractmethod
    def resolve(self) -> list[float]:
        """Durations of the ops so far in seconds, in order; waits for the device if it must."""


class HostClock(OpClock):
    """Takes the host's durations, where the host runs the ops itself or they are modelled."""

    def __init__(self) -> None:
        self._seconds: list[float] = []

    @override
    def before_op(self) -> None:
        pass

    @override
    def after_op(self, host_seconds: float) -> None:
        self._seconds.append(host_seconds)

    @override
    def resolve(self) -> list[float]:
        return self._seconds


class Mark(Protocol):
    """A point in a stream that the device will reach, such as a recorded ``torch.Event``."""

    def synchronize(self) -> None:
        """Block until the stream came to it."""

    def query(self) -> bool:
        """Whether the stream came to it."""

    def elapsed_time(self, end: Any, /) -> float:
        """Milliseconds from here to another mark, both reached."""


class DeviceClock(OpClock):
    """Marks the device's current stream around each op, and holds the device back: Note [starved devices].

    Args:
        device: The accelerator.
        mark: Marks the stream that is current on the device; by default with an event that keeps time.
        synchronize: Waits until the device has reached all marks.
        hold: Has the stream that is current on the device do nothing for some seconds; None where it cannot be held.
        launch_seconds: What lies between the marks of an op that does next to nothing, while the device waits for it.
        mark_seconds: What lies between two marks that follow each other, while the device has enough to do.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        mark: Callable[[torch.device], Mark] | None = None,
        synchronize: Callable[[torch.device], None] | None = None,
        hold: Callable[[torch.device, float], None] | None = None,
        launch_seconds: Callable[[torch.device], float] | None = None,
        mark_seconds: Callable[[torch.device], float] | None = None,
    ) -> None:
        self._device = indexed(device)
        self._mark = mark or record_event
        self._synchronize = synchronize or torch.accelerator.synchronize
        self._hold = hold
        self._launch_seconds = launch_seconds or empty_launch_seconds
        self._mark_seconds = mark_seconds or empty_mark_seconds
        self._open = _OpMark()
        self._spans: list[_Span] = []
        self._seconds: list[float] = []
        self._held_at = -1  # the first op since the device was last held; -1 before that
        self._num_wasted = 0
        self._hold_again_at = 0.0

    @override
    def before_op(self) -> None:
        if self._hold is not None:
            self._keep_ahead(self._hold)
        self._open.start = self._mark(self._device)

    @override
    def after_op(self, host_seconds: float) -> None:
        end = self._mark(self._device)
        start, self._open.start = self._open.start, None
        self._spans.append(_Span(start, end, host_seconds, is_after_hold=len(self._spans) == self._held_at))

    @override
    def resolve(self) -> list[float]:
        if self._spans:
            self._synchronize(self._device)
            mark_seconds = self._mark_seconds(self._device) if self._hold is not None else 0.0
            before = None
            for span in self._spans:
                seconds = span.seconds()
                if seconds is None:
                    self._seconds.append(span.host_seconds)
                elif span.follows_a_gap(before):
                    seconds = max(seconds - self._launch_seconds(self._device), min(seconds, _LEAST_SECONDS))
                    self._seconds.append(seconds)
                else:
                    self._seconds.append(max(0.0, seconds - mark_seconds))
                before = span
            self._spans.clear()
            self._held_at, self._hold_again_at = -1, 0.0
        return self._seconds

    def _keep_ahead(self, hold: Callable[[torch.device, float], None]) -> None:
        """Hold the device where it may run out of ops soon."""
        now, spans = time.perf_counter(), self._spans
        if now < self._hold_again_at or self._num_wasted >= _MAX_WASTED or is_capturing():
            return
        if len(spans) >= _NUM_AHEAD and not spans[-_NUM_AHEAD].is_over():
            return
        if spans and self._held_at >= 0 and len(spans) - self._held_at < _FEW and spans[-1].is_over():
            self._num_wasted += 1  # the program waits for the device again and again
        hold(self._device, _HOLD_SECONDS)
        self._held_at = len(spans)
        self._hold_again_at = now + _HOLD_AGAIN_SECONDS


class _OpMark(threading.local):
    """The mark before the op that a thread runs: autograd has a thread for each device."""

    start: Mark | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class _Span:
    start: Mark | None
    end: Mark
    host_seconds: float
    is_after_hold: bool

    def is_over(self) -> bool:
        """Whether the device has come to its end."""
        try:
            return self.end.query()
        except RuntimeError:  # marked while a graph was captured
            return False

    def follows_a_gap(self, before: _Span | None) -> bool:
        """Whether the device waited for this op: Note [starved devices]."""
        if before is None or self.start is None or self.is_after_hold:
            return False
        try:
            return before.end.elapsed_time(self.start) * 1e-3 > _GAP_SECONDS
        except (RuntimeError, ValueError):
            return False

    def seconds(self) -> float | None:
        """What lies between its marks; None where they have no time."""
        if self.start is None:
            return None
        try:
            return max(0.0, self.start.elapsed_time(self.end) * 1e-3)
        except (RuntimeError, ValueError):
            # A mark set while a CUDA graph was captured has no time: only the capture ran, and on the host.
            return None


def record_event(device: torch.device) -> Mark:
    """Mark the stream that is current on a device, looked up now.

    The stream is named because an event without one takes the current device's, whatever device it was made for.
    """
    event = torch.Event(device, enable_timing=True)
    event.record(torch.accelerator.current_stream(device))
    return event


@functools.cache
def empty_launch_seconds(device: torch.device) -> float:
    """What lies between the marks of an op on one element, while an accelerator waits for it; 0 where it cannot run."""
    if not kind_of(device).has_streams:
        return 0.0
    try:
        with _disable_current_modes(), torch.no_grad():
            element, found = torch.zeros(1, device=device), []
            for _ in range(_NUM_LAUNCHES):
                torch.accelerator.synchronize(device)
                start = record_event(device)
                element.add_(1)
                end = record_event(device)
                torch.accelerator.synchronize(device)
                found.append(start.elapsed_time(end) * 1e-3)
    except RuntimeError:  # out of memory above all
        return 0.0
    return statistics.median(found)


@functools.cache
def empty_mark_seconds(device: torch.device) -> float:
    """What lies between two marks that follow each other on an accelerator that is busy; 0 where it cannot be held."""
    if not kind_of(device).can_be_held:
        return 0.0
    hold(device, _HOLD_SECONDS)
    pairs = [(record_event(device), record_event(device)) for _ in range(_NUM_LAUNCHES)]
    torch.accelerator.synchronize(device)
    return statistics.median(before.elapsed_time(after) * 1e-3 for before, after in pairs)


def clock_for(device: torch.device) -> OpClock:
    """The clock that tells how long ops take on a device."""
    kind = kind_of(device)
    if not kind.has_streams:
        return HostClock()
    return DeviceClock(device, hold=hold if kind.can_be_held else None)


class OpTimes(StepObserver):
    """Durations, and perhaps workspaces, of the ops of one step, in order.

    Args:
        clock: Times the ops; by default the host's.
        memory: Measures their workspaces; by default they are not measured. Who gives it reads the step's peak
            from it: Note [the peak is reset for each op].

    Attributes:
        names: The overload of each op.
        workspace_bytes: The workspace of each op; empty if they were not measured.
    """

    def __init__(self, clock: OpClock | None = None, memory: OpMemory | None = None) -> None:
        self.names: list[str] = []
        self.workspace_bytes: list[int] = []
        self._clock = clock or HostClock()
        self._memory = memory

    @property
    def seconds(self) -> list[float]:
        """One entry an op; waits for the device."""
        return self._clock.resolve()

    @property
    def allocator_peak_bytes(self) -> int | None:
        """The true peak of the device's allocator since the first op, up to now; None if it was not measured."""
        return self._memory.peak_bytes if self._memory is not None else None

    @override
    def before_op(self, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._memory is not None:
            self._memory.before_op()
        self._clock.before_op()

    @override
    def on_op(
        self, facts: OpFacts, args: Any, kwargs: Any, out: Any, seconds: float, did: Effects | None = None
    ) -> None:
        self._clock.after_op(seconds)
        if self._memory is not None:
            self.workspace_bytes.append(self._memory.after_op())
        self.names.append(facts.name)


def retime(graph: StepGraph, times: OpTimes) -> StepGraph:
    """The graph with what was measured in a later step; unchanged if that step ran other ops.

    Of two durations the smaller counts: what a busy machine adds is no property of the op. Of two workspaces the
    later one counts: the first call of an op may have been a trial run.
    """
    if times.names != [op.name for op in graph.ops]:
        return graph
    workspaces = times.workspace_bytes or [op.workspace_bytes for op in graph.ops]
    ops = (
        dataclasses.replace(op, seconds=min(seconds, op.seconds), workspace_bytes=workspace_bytes)
        for op, seconds, workspace_bytes in zip(graph.ops, times.seconds, workspaces, strict=True)
    )
    return dataclasses.replace(graph, ops=tuple(ops))


def scaled(graph: StepGraph, factor: float) -> StepGraph:
    """The graph with all durations multiplied by a factor."""
    ops = (dataclasses.replace(op, seconds=factor * op.seconds) for op in graph.ops)
    return dataclasses.replace(graph, ops=tuple(ops))
