"""Scopes of a step add up: by the clock on a CPU, by events elsewhere, and only where they are watched."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_offload.plugins import step as step_clock
from lightning_offload.plugins.step import StepClock
from tests.capture.devices import LaunchQueue

CPU, OTHER = torch.device("cpu"), torch.device("cuda", 0)


class _Event:
    """An event that is reached at some millisecond."""

    def __init__(self, at: float, asked: list[Any]) -> None:
        self.at = at
        self.asked = asked

    def synchronize(self) -> None:
        self.asked.append(f"waited until {self.at}")

    def elapsed_time(self, end: _Event) -> float:
        return end.at - self.at


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Events 3, 4, 10, 30 ms after the start, in this order; what was asked of the device is noted."""
    asked: list[Any] = []
    left = iter([3.0, 4.0, 10.0, 30.0])

    def record_event(device: torch.device) -> _Event:
        asked.append(device)
        return _Event(next(left), asked)

    monkeypatch.setattr(step_clock, "record_event", record_event)
    return asked


@pytest.mark.parametrize("is_watched", [True, False])
def test_clock_of_a_cpu(is_watched: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every scope counts, what lies between them does not; a scope that raises counts as well."""
    ticks = iter([0.0, 1.0, 10.0, 12.0, 20.0, 24.0])
    monkeypatch.setattr(step_clock, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    clock = StepClock(CPU, is_watched=is_watched)
    assert clock.seconds() == 0
    for seconds in (1.0, 3.0):
        with clock.running():
            pass
        assert clock.seconds() == seconds
    with pytest.raises(KeyError), clock.running():
        raise KeyError
    assert clock.seconds() == 7.0


def test_events_of_a_device(events: list[Any]) -> None:
    """Milliseconds between events become seconds; the last is waited for once they are asked for, not before."""
    clock = StepClock(OTHER, is_watched=True)
    assert clock.seconds() is None
    with clock.running():
        pass
    with pytest.raises(KeyError), clock.running():
        raise KeyError
    assert events == [OTHER] * 4
    assert clock.seconds() == pytest.approx(0.021)
    assert events[4:] == ["waited until 30.0"]


def test_unwatched_steps_of_a_device_cost_nothing(events: list[Any]) -> None:
    """No event, no wait, no figure."""
    clock = StepClock(OTHER, is_watched=False)
    with clock.running():
        pass
    assert clock.seconds() is None
    assert events == []


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> LaunchQueue:
    """A device and its host, by whose clock steps are timed."""
    made = LaunchQueue()
    monkeypatch.setattr(step_clock.time, "perf_counter", lambda: made.host_seconds)
    monkeypatch.setattr(step_clock, "record_event", made.mark)
    return made


@pytest.mark.parametrize("is_apart", [False, True], ids=["one scope", "a scope for backward"])
@pytest.mark.parametrize(
    ("launch", "compute", "expected"),
    [(2e-3, 1e-3, ((0.2, 0.2), (0.201, 0.2))), (1e-3, 2e-3, ((0.1, 0.1), (0.201, 0.2)))],
    ids=["the device waits", "the host is ahead"],
)
def test_what_launching_takes_and_computing(
    queue: LaunchQueue, launch: float, compute: float, expected: tuple[tuple[float, float], ...], is_apart: bool
) -> None:
    """By the host's clock and by the device's, in forward and in backward."""
    clock = StepClock(OTHER, is_watched=True)

    def half() -> None:
        for _ in range(100):
            queue.launch(launch, compute)

    with clock.running():
        half()
        if not is_apart:
            clock.backward_begins()
            half()
    if is_apart:
        queue.launch(5.0, 0.0)  # what a program does between both
        clock.backward_begins()
        with clock.running():
            half()
    times = clock.launch_times()
    assert times is not None
    assert times.is_one is not is_apart
    for half, (forward, backward) in zip((times.host, times.device), expected, strict=True):
        assert half == (pytest.approx(forward, abs=2e-3), pytest.approx(backward, abs=2e-3))


def test_launch_times_of_unwatched_steps_are_not_known(queue: LaunchQueue) -> None:
    """Marks cost the host time."""
    clock = StepClock(OTHER, is_watched=False)
    with clock.running():
        clock.backward_begins()
        queue.launch(1.0, 1.0)
    assert clock.launch_times() is None
    assert clock.seconds() is None
