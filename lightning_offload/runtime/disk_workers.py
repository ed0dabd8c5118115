"""The two threads of the disk lanes, which hold no GIL while they work.

Order: copies of one direction are made in the order in which they were asked for. A copy out is done when all of
it is in the file; a copy in, when the device has it. A copy in comes after the copy out that fills its block, and a
copy out comes after whatever still uses its block or that block's memory. All of these were asked for before, so
the two never wait for each other in a circle; but a worker ends what it has begun before it waits for the other.

A worker holds a storage and a block until it has ended a copy, and lets go of both before it says so: who waits
for the copy counts on being the last to hold them. From then on movers see to it that the device memory of their
moves lives.
"""

from __future__ import annotations

import abc
import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable

from typing_extensions import override

from lightning_offload.errors import SpillError
from lightning_offload.runtime.copies import Copy, done_copy
from lightning_offload.runtime.disk_jobs import HostChunk, InwardCopy, Job, Slot, settled
from lightning_offload.runtime.movers import Mover
from lightning_offload.runtime.spill_file import ALIGNMENT


class _Worker(abc.ABC):
    """A thread that takes jobs in order; without one, the thread that submits them does."""

    def __init__(self, name: str, mover: Mover, staging: Callable[[int], HostChunk], chunk_bytes: int) -> None:
        self._name = name
        self._mover = mover
        self._staging = staging
        self._chunk_bytes = chunk_bytes
        self._ring: tuple[Slot, ...] = ()
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._last = done_copy()
        self._pid = os.getpid()
        self._done_bytes = 0
        self._busy_seconds = 0.0

    def prepare(self) -> None:
        """Have the chunks.

        Raises:
            OSError: The host refused the memory; MemoryError likewise.
        """
        if not self._ring:
            self._ring = tuple(Slot(self._staging(self._chunk_bytes)) for _ in range(2))

    def submit(self, job: Job) -> None:
        self._leave_parent()
        self.prepare()
        if self._is_closed:
            self._perform(job)
            self._finish()
            if job.error is not None and not isinstance(job.error, Exception):
                raise job.error  # an interrupt of this very thread
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        self._last = job.copy
        self._jobs.put(job)

    def take(self) -> tuple[int, float]:
        self.drain()
        taken = self._done_bytes, self._busy_seconds
        self._done_bytes, self._busy_seconds = 0, 0.0
        return taken

    def _leave_parent(self) -> None:
        """In a fork there is no thread any more, and the file refuses: copies fail at once, in the caller's thread."""
        if os.getpid() != self._pid:
            self._pid, self._is_closed, self._thread = os.getpid(), True, None
            self._last, self._ring = done_copy(), ()

    def drain(self) -> None:
        self._leave_parent()
        self._last.settle()
        for slot in self._ring:
            settled(slot.move)

    def close(self) -> None:
        self._leave_parent()
        self._is_closed = True
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None
        self.drain()
        self._ring = ()

    def _work(self) -> None:
        while (job := self._next()) is not None:
            self._perform(job)
            del job
        self._finish()

    def _next(self) -> Job | None:
        return self._jobs.get()

    @abc.abstractmethod
    def _perform(self, job: Job) -> None:
        """Make a copy; raises nothing."""

    def _finish(self) -> None:  # noqa: B027  (a reader leaves nothing open)
        """End what :meth:`_perform` left open."""

    def _pieces(self, job: Job) -> list[tuple[int, int]]:
        """Offsets and sizes of what passes through one chunk each."""
        size, total = self._chunk_bytes, job.num_bytes
        return [(begin, min(size, total - begin)) for begin in range(0, total, size)]


class Writer(_Worker):
    """Copies out.

    The piece that was asked of the device last is written only when the next one has been asked for, be it of the
    same job or of the next.
    """

    _open: _Piece | None = None

    @override
    def _next(self) -> Job | None:
        if self._open is not None:
            with contextlib.suppress(queue.Empty):
                return self._jobs.get_nowait()
            self._finish()
        return self._jobs.get()

    @override
    def _perform(self, job: Job) -> None:
        pieces = self._pieces(job)
        try:
            self._await(job.users)
            for begin, size in pieces:
                piece = self._ask(job, begin, size)
                self._finish()
                self._open = piece
                if job.error is not None:
                    break
            # A mover that copies in this thread gains nothing from what is left open, and this job would end later.
            if self._open is not None and self._open.slot.move.is_done:
                self._finish()
        except BaseException as error:  # reported to the thread that waits
            job.fail(error)
        if job.error is not None:
            self._finish()
        if (job.error is not None or not pieces) and not job.copy.is_done:
            job.end()

    def _await(self, users: tuple[Copy, ...]) -> None:
        for copy in users:
            if not copy.is_done:
                self._finish()  # it may wait for that
                copy.settle_reads() if isinstance(copy, InwardCopy) else settled(copy)

    def _ask(self, job: Job, begin: int, size: int) -> _Piece:
        slot = self._ring[0] if self._open is None or self._open.slot is self._ring[1] else self._ring[1]
        start = time.perf_counter()
        slot.move = self._mover.to_host(job.mark, job.storage, begin, size, slot.address)
        self._busy_seconds += time.perf_counter() - start
        return _Piece(job, slot, begin, size)

    @override
    def _finish(self) -> None:
        """Write the open piece; a failure is its own job's."""
        piece, self._open = self._open, None
        if piece is None:
            return
        job = piece.job
        try:
            piece.slot.move.synchronize()
            if job.error is None:
                self._write(piece)
        except BaseException as error:
            job.fail(error)
        if piece.begin + piece.size == job.num_bytes:
            job.end()

    def _write(self, piece: _Piece) -> None:
        block = piece.job.block
        start = time.perf_counter()
        try:
            block.file.write(piece.slot.address, _padded(piece.size), block.offset + piece.begin)
        except SpillError as error:
            block.pool.fail(error)
            raise
        self._busy_seconds += time.perf_counter() - start
        self._done_bytes += piece.size


class _Piece:
    """What of a job passes through a chunk at once."""

    __slots__ = ("begin", "job", "size", "slot")

    def __init__(self, job: Job, slot: Slot, begin: int, size: int) -> None:
        self.job = job
        self.slot = slot
        self.begin = begin
        self.size = size


class Reader(_Worker):
    """Copies in."""

    @override
    def _perform(self, job: Job) -> None:
        assert isinstance(job.copy, InwardCopy)
        pieces = self._pieces(job)
        try:
            self._await(job.users)
            for i, (begin, size) in enumerate(pieces):
                # The slot of two pieces ago; the first two were another job's, which reports its own failure.
                error = settled(self._ring[0].move)
                if error is not None and i >= len(self._ring):
                    raise error
                self._read(job, begin, size)
        except BaseException as error:  # reported to the thread that waits
            job.fail(error)
            for slot in self._ring:
                settled(slot.move)  # who waits gives the memory up at once
        else:
            job.copy.moves = tuple(slot.move for slot in self._ring[max(0, len(self._ring) - len(pieces)) :])
        job.end()

    def _await(self, written: tuple[Copy, ...]) -> None:
        for copy in written:
            error = settled(copy)
            if error is not None:
                raise SpillError(f"what should be read was never written: {error}") from error

    def _read(self, job: Job, begin: int, size: int) -> None:
        slot, block = self._ring[0], job.block
        start = time.perf_counter()
        block.file.read(slot.address, _padded(size), block.offset + begin)
        slot.move = self._mover.to_device(job.mark, job.storage, begin, size, slot.address)
        self._busy_seconds += time.perf_counter() - start
        self._done_bytes += size
        self._ring = (*self._ring[1:], slot)


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
