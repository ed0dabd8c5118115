"""What tests of the disk tier share: aligned memory, failing calls, and a device that copies as late as it likes."""

from __future__ import annotations

import ctypes
import mmap
import os
import queue
import random
import threading
import time
from collections.abc import Callable, Container, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typing_extensions import override

from lightning_offload.runtime.lanes import Copy, CpuMover, Mover, storage_bytes
from lightning_offload.runtime.spill import DiskBlock, DiskPool
from lightning_offload.runtime.spill_file import ALIGNMENT
from lightning_offload.runtime.staged_lanes import StagedLanes

SMALL = 2 * ALIGNMENT
"""Chunks of this size make many pieces of few bytes."""


def failing(number: int) -> Any:
    """A call of the system that fails with this error."""

    def fail(*args: object) -> int:
        raise OSError(number, os.strerror(number))

    return fail


class Page:
    """Page-aligned memory.

    Attributes:
        address: Where it begins.
        num_bytes: Its size.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._memory = mmap.mmap(-1, num_bytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))

    @classmethod
    def random(cls, seed: int, num_bytes: int) -> Page:
        """Memory with random contents."""
        page = cls(num_bytes)
        page._memory[:] = random.Random(seed).randbytes(num_bytes)
        return page

    @property
    def bytes(self) -> bytes:
        """Its contents."""
        return self._memory[:]


class LateCopy(Copy):
    """A move of the device.

    Attributes:
        error: Why it failed, if it did.
        num_waits: How often compute was ordered after it.
    """

    def __init__(self) -> None:
        self.num_waits = 0
        self._done = threading.Event()
        self.error: Exception | None = None

    def finish(self, error: Exception | None) -> None:
        """Tell who waits."""
        self.error = error
        self._done.set()

    @property
    @override
    def is_done(self) -> bool:
        return self._done.is_set()

    @override
    def wait(self) -> float:
        """No thread waits."""
        self.num_waits += 1
        return 0.0

    @override
    def synchronize(self) -> None:
        assert self._done.wait(timeout=60), "a move never ended"
        if self.error is not None:
            raise self.error


class LateMover(Mover):
    """Two streams, each a thread that makes its moves in order, some time after they were asked for.

    Args:
        seed: Of the delays.
        max_delay_seconds: The longest sleep before a move.

    Attributes:
        compute: Marks taken while this is unset are reached when it is set.
        failing_moves: The numbers of those that fail.
        moves: All that were asked for.
    """

    def __init__(self, seed: int = 0, max_delay_seconds: float = 0.0) -> None:
        self.compute = threading.Event()
        self.compute.set()
        self.failing_moves: Container[int] = ()
        self.moves: list[LateCopy] = []
        self._dice = random.Random(seed)
        self._max_delay_seconds = max_delay_seconds
        self._out, self._in = _Stream(), _Stream()

    @override
    def mark(self) -> threading.Event:
        return self.compute

    @override
    def to_host(
        self, mark: threading.Event, storage: torch.UntypedStorage, offset: int, num_bytes: int, address: int
    ) -> Copy:
        return self._ask(self._out, mark, storage, address, storage.data_ptr() + offset, num_bytes)

    @override
    def to_device(
        self, mark: threading.Event, storage: torch.UntypedStorage, offset: int, num_bytes: int, address: int
    ) -> Copy:
        return self._ask(self._in, mark, storage, storage.data_ptr() + offset, address, num_bytes)

    @override
    def settle(self) -> None:
        for move in self.moves:
            if not move.num_waits:
                move.synchronize()

    def end(self) -> None:
        """End the streams' threads."""
        self.compute.set()
        self._out.end()
        self._in.end()

    def _ask(
        self, stream: _Stream, mark: threading.Event, storage: torch.UntypedStorage, to: int, off: int, size: int
    ) -> Copy:
        copy = LateCopy()
        error = RuntimeError("the device fell off") if len(self.moves) in self.failing_moves else None
        delay = self._dice.random() ** 4 * self._max_delay_seconds
        held = [storage]
        self.moves.append(copy)

        def move() -> None:
            assert mark.wait(timeout=60)
            time.sleep(delay)
            if error is None:
                ctypes.memmove(to, off, size)
            held.clear()
            copy.finish(error)

        stream.jobs.put(move)
        return copy


class _Stream:
    def __init__(self) -> None:
        self.jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="late-mover", daemon=True)
        self._thread.start()

    def end(self) -> None:
        self.jobs.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (job := self.jobs.get()) is not None:
            job()
            del job


def storage_of(seed: int, num_bytes: int) -> torch.UntypedStorage:
    """Device memory with random bytes."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=generator).untyped_storage()


def empty(num_bytes: int) -> torch.UntypedStorage:
    """Device memory to swap in to."""
    return torch.zeros(num_bytes, dtype=torch.uint8).untyped_storage()


def block_of(pool: DiskPool, num_bytes: int, at: int | None = None) -> DiskBlock:
    """Disk space."""
    block = pool.allocate(num_bytes, at)
    assert block is not None
    return block


def equal(one: torch.UntypedStorage, other: torch.UntypedStorage) -> bool:
    """Whether two storages hold the same bytes."""
    return torch.equal(storage_bytes(one), storage_bytes(other))


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[DiskPool]:
    """A pool in a folder of its own."""
    made = DiskPool(tmp_path)
    yield made
    made.close()


@pytest.fixture
def lanes() -> Iterator[StagedLanes]:
    """Lanes of a CPU, with small chunks."""
    made = StagedLanes(CpuMover(), chunk_bytes=SMALL)
    yield made
    made.close()


@pytest.fixture
def mover() -> Iterator[LateMover]:
    """A device that is up to 2 ms late."""
    made = LateMover(1, max_delay_seconds=0.002)
    yield made
    made.end()


@pytest.fixture
def late_lanes(mover: LateMover) -> Iterator[StagedLanes]:
    """Its lanes, with small chunks."""
    made = StagedLanes(mover, chunk_bytes=SMALL)
    yield made
    mover.compute.set()
    made.close()
