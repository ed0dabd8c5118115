"""Streams and events without an accelerator: each stream is a thread that works off a queue, as late as it likes.

The compute stream is the calling thread itself: what it recorded is done at once, and what it waits for blocks it.
So the very ordering that :class:`StreamLanes` sets up decides whether bytes are right.
"""

from __future__ import annotations

import contextlib
import ctypes
import queue
import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch
from typing_extensions import override

from lightning_offload.runtime.stream_lanes import StreamLanes


class FakeEvent:
    """Done once a stream reached it; never recorded counts as done, as with torch's."""

    def __init__(self) -> None:
        self._reached = threading.Event()
        self._reached.set()
        self.seconds = 0.0

    def record(self, stream: FakeStream | FakeCompute) -> None:
        """Be reached when the stream has done what it was asked for so far."""
        self._reached.clear()
        stream.put(self.reach)

    def reach(self) -> None:
        """A stream arrived."""
        self.seconds = time.perf_counter()
        self._reached.set()

    def query(self) -> bool:
        """Whether it was reached."""
        return self._reached.is_set()

    def synchronize(self) -> None:
        """Block until it is reached."""
        assert self._reached.wait(timeout=60), "a stream never came to an event"

    def elapsed_time(self, end: FakeEvent) -> float:
        """Milliseconds between two events that were reached."""
        assert self.query()
        assert end.query()
        return (end.seconds - self.seconds) * 1000


class FakeCompute:
    """The calling thread; there is but one compute stream."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FakeCompute)

    def __hash__(self) -> int:
        return 0

    def put(self, job: Any) -> None:
        """Do it now."""
        job()

    def wait_event(self, event: FakeEvent) -> None:
        """Block until an event is reached."""
        event.synchronize()


class FakeStream:
    """A thread that works off a queue.

    Attributes:
        delay: Gives the seconds that it sleeps before each copy.
    """

    def __init__(self, mover: FakeStreamLanes, delay: Any) -> None:
        self.delay = delay
        self._mover = mover
        self._jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="fake-stream", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job

    def put(self, job: Any) -> None:
        """Do it after what was put before."""
        self._jobs.put(job)

    def wait_event(self, event: FakeEvent) -> None:
        """Go on only after an event."""
        self.put(event.synchronize)

    def end(self) -> None:
        """End the thread."""
        self._jobs.put(None)
        self._thread.join()


class _Current(threading.local):
    """Each thread has a stream of its own, as with torch."""

    stream: FakeStream | None = None


class FakeStreamLanes(StreamLanes):
    """A stream mover for CPU memory.

    Args:
        seed: Of the delays.
        max_delay_seconds: The longest sleep before a copy.
    """

    def __init__(self, seed: int = 0, max_delay_seconds: float = 0.0) -> None:
        self._current = _Current()
        self._random = random.Random(seed)
        self._max_delay_seconds = max_delay_seconds
        self._streams: list[FakeStream] = []
        super().__init__(torch.device("cpu"))

    @override
    def in_core(self, core: Any) -> None:
        """Its streams are Python's threads."""

    @override
    def begin_thread(self) -> None:
        """There is but one device."""

    @override
    def new_stream(self) -> FakeStream:
        stream = FakeStream(self, lambda: self._random.random() ** 4 * self._max_delay_seconds)
        self._streams.append(stream)
        return stream

    @override
    def new_event(self, *, timing: bool = False) -> FakeEvent:
        return FakeEvent()

    @override
    def compute_stream(self) -> FakeCompute:
        return FakeCompute()

    @override
    @contextlib.contextmanager
    def on_stream(self, stream: FakeStream) -> Iterator[None]:
        self._current.stream = stream
        try:
            yield
        finally:
            self._current.stream = None

    @override
    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy by address alone: like a device, this keeps no memory alive."""
        stream, to, off, size = self._current.stream, target.data_ptr(), source.data_ptr(), target.nbytes
        assert stream is not None

        def move() -> None:
            time.sleep(stream.delay())
            ctypes.memmove(to, off, size)

        stream.put(move)

    @override
    def note_use(self, storage: torch.UntypedStorage) -> None:
        """No allocator of a host knows streams."""

    def end(self) -> None:
        """End the streams' threads."""
        self.drain()
        for stream in self._streams:
            stream.end()
