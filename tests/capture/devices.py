"""Fakes of what an accelerator tells: the time at which it reaches a mark, and its allocator's figures."""

from __future__ import annotations

import dataclasses
from collections import deque

import torch


@dataclasses.dataclass
class FakeMark:
    """A mark that the device reaches at a time in seconds; None: it never gets a time."""

    device: torch.device
    at_seconds: float | None
    stream: FakeStream

    def elapsed_time(self, end: FakeMark) -> float:
        assert self.stream.num_waits, "read before the device was awaited"
        if self.at_seconds is None or end.at_seconds is None:
            raise RuntimeError("this event has no time")
        return (end.at_seconds - self.at_seconds) * 1e3


class _Elsewhere(torch.Tensor):
    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.claimed  # type: ignore[attr-defined, no-any-return]


def pretend_on(device: str, num: int = 100) -> torch.Tensor:
    """A vector that says it is on a device."""
    tensor = torch.ones(num).as_subclass(_Elsewhere)
    tensor.claimed = torch.device(device)  # type: ignore[attr-defined]
    return tensor


class FakeStream:
    """A stream whose marks are reached at given times, one after the other; past these, one second apart."""

    def __init__(self, *times: float | None) -> None:
        self.num_marks = self.num_waits = 0
        self.devices: set[torch.device] = set()
        self._times = deque(times)

    def mark(self, device: torch.device) -> FakeMark:
        self.num_marks += 1
        self.devices.add(device)
        return FakeMark(device, self._times.popleft() if self._times else float(self.num_marks), self)

    def synchronize(self, device: torch.device) -> None:
        self.devices.add(device)
        self.num_waits += 1


@dataclasses.dataclass
class QueueMark:
    """A mark that the device reaches once it is through with all before it."""

    at_seconds: float
    queue: LaunchQueue

    def query(self) -> bool:
        return self.at_seconds <= self.queue.host_seconds

    def synchronize(self) -> None:
        self.queue.host_seconds = max(self.queue.host_seconds, self.at_seconds)

    def elapsed_time(self, end: QueueMark) -> float:
        return (end.at_seconds - self.at_seconds) * 1e3


@dataclasses.dataclass
class LaunchQueue:
    """A host that launches ops one after the other, and a device that runs each once it is launched and free."""

    host_seconds: float = 0.0
    device_seconds: float = 0.0
    num_held: int = 0

    def launch(self, host_seconds: float, device_seconds: float) -> None:
        self.host_seconds += host_seconds
        self.device_seconds = max(self.device_seconds, self.host_seconds) + device_seconds

    def mark(self, device: torch.device) -> QueueMark:
        self.device_seconds = max(self.device_seconds, self.host_seconds)
        return QueueMark(self.device_seconds, self)

    def hold(self, device: torch.device, seconds: float) -> None:
        self.num_held += 1
        self.launch(0.0, seconds)

    def synchronize(self, device: torch.device) -> None:
        self.host_seconds = max(self.host_seconds, self.device_seconds)


class FakeMemory:
    """An allocator that is told what is allocated and freed."""

    def __init__(self, allocated_bytes: int = 0) -> None:
        self.now = self.peak = allocated_bytes
        self.num_resets = 0

    def allocate(self, num_bytes: int) -> None:
        self.now += num_bytes
        self.peak = max(self.peak, self.now)

    def free(self, num_bytes: int) -> None:
        self.now -= num_bytes

    def read(self) -> tuple[int, int]:
        return self.now, self.peak

    def reset_peak(self) -> None:
        self.num_resets += 1
        self.peak = self.now
