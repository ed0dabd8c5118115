"""How long a step's scopes take: by the clock on a CPU, by events in the compute stream of any other device."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch

from lightning_offload.capture.timing import Mark, record_event


class StepClock:
    """Adds up the scopes of one step.

    Args:
        device: Where the step runs.
        is_watched: Whether the step is measured; events cost host time, so other steps on a device go without.
    """

    def __init__(self, device: torch.device, *, is_watched: bool) -> None:
        self._device = device
        self._by_events = device.type != "cpu"
        self._is_watched = is_watched
        self._seconds = 0.0
        self._scopes: list[tuple[Mark, Mark]] = []

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Around each scope of the step."""
        if self._by_events and not self._is_watched:
            yield
            return
        begin = record_event(self._device) if self._by_events else time.perf_counter()
        try:
            yield
        finally:
            if isinstance(begin, float):
                self._seconds += time.perf_counter() - begin
            else:
                self._scopes.append((begin, record_event(self._device)))

    def seconds(self) -> float | None:
        """The duration so far; None where it was not measured. Waits for the device."""
        if not self._by_events:
            return self._seconds
        if not self._scopes:
            return None
        self._scopes[-1][1].synchronize()
        return sum(begin.elapsed_time(end) for begin, end in self._scopes) / 1000
