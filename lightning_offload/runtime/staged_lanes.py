"""Lanes between a device and a tier that it cannot reach by itself, through a little host memory that it can.

The tier is a spill file, or host memory that could not be page-locked: a device copies to and from such memory only
while the host stands by. Bytes pass through rings of two page-aligned chunks, one ring for each direction, so that one
chunk is on its way between device and memory while the other is on its way between memory and the tier. What a device
needs of its host memory (page locks, say) is the business of whoever gives the chunks. Two threads do the work, which
hold no GIL meanwhile; the thread that computes does other things.

Order: copies of one direction are made in the order in which they were asked for. A copy out is done when all of
it is in its block; a copy in, when the device has it. A copy in comes after the copy out that fills its block, and a
copy out comes after whatever still uses its block or that block's memory. All of these were asked for before, so
the two never wait for each other in a circle; but a worker ends what it has begun before it waits for the other.

Once a job has let go of its storage, movers see to it that the device memory of their moves lives.
"""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Callable

import torch
from typing_extensions import override

from lightning_offload.errors import SpillError
from lightning_offload.runtime.cpu_lanes import Job, Worker, WorkerLanes
from lightning_offload.runtime.host_pool import Slab
from lightning_offload.runtime.lanes import Block, Copy, HostCopy, LaneTimes, Mover, done_copy, without_frames
from lightning_offload.runtime.spill_file import ALIGNMENT

CHUNK_BYTES = 8 << 20
"""Large enough for a disk's full rate; four of them are all the host memory that a tier's lanes take."""


class Slot:
    """A chunk of the ring.

    Attributes:
        address: Where its memory begins.
        move: The latest move from or to it.
    """

    def __init__(self, chunk: Slab) -> None:
        self._chunk = chunk
        self.address = chunk.address
        self.move: Copy = done_copy()


class InwardCopy(HostCopy):
    """A copy in: first the worker issues its moves, then the device makes them.

    Attributes:
        moves: Those that may be under way when the worker has issued the last one.
    """

    __slots__ = ("moves",)

    def __init__(self) -> None:
        super().__init__()
        self.moves: tuple[Copy, ...] = ()

    @property
    @override
    def is_done(self) -> bool:
        return self._done.is_set() and all(move.is_done for move in self.moves)

    @override
    def wait(self) -> float:
        start = time.perf_counter()
        super().synchronize()  # not our own, which would block for the moves
        return time.perf_counter() - start + sum(move.wait() for move in self.moves)

    @override
    def synchronize(self) -> None:
        super().synchronize()
        for move in self.moves:
            move.synchronize()

    @override
    def settle(self) -> None:
        self.ended()  # it uses the file no more, though the device may still wait for its bytes
        for move in self.moves:
            settled(move)


def settled(copy: Copy) -> BaseException | None:
    """Block until a copy is done or has failed, and say why."""
    try:
        copy.synchronize()
    except BaseException as error:
        return without_frames(error)
    return None


class StagedWorker(Worker):
    """A worker with a ring of two chunks that bytes pass through.

    Args:
        name: The thread's name.
        mover: Copies between the device and the chunks.
        staging: Gives the chunks.
        chunk_bytes: Their size.
    """

    def __init__(self, name: str, mover: Mover, staging: Callable[[int], Slab], chunk_bytes: int) -> None:
        super().__init__(name)
        self._mover = mover
        self._staging = staging
        self._chunk_bytes = chunk_bytes
        self._ring: tuple[Slot, ...] = ()

    def prepare(self) -> None:
        """Have the chunks.

        Raises:
            OSError: The host refused the memory.
            MemoryError: There was none left.
        """
        if not self._ring:
            self._ring = tuple(Slot(self._staging(self._chunk_bytes)) for _ in range(2))

    @override
    def submit(self, job: Job) -> None:
        self._leave_parent()
        self.prepare()
        super().submit(job)

    @override
    def _forked(self) -> None:
        self._ring = ()

    @override
    def _work(self) -> None:
        with contextlib.suppress(Exception):  # a device that cannot be had fails each copy, and who waits is told
            self._mover.begin_thread()
        super()._work()

    @override
    def drain(self) -> None:
        super().drain()
        for slot in self._ring:
            settled(slot.move)

    @override
    def close(self) -> None:
        super().close()
        self.drain()
        self._ring = ()

    def _pieces(self, job: Job) -> list[tuple[int, int]]:
        """Offsets and sizes of what passes through one chunk each."""
        size, total = self._chunk_bytes, job.num_bytes
        return [(begin, min(size, total - begin)) for begin in range(0, total, size)]


class Writer(StagedWorker):
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
                copy.ended() if isinstance(copy, InwardCopy) else settled(copy)

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
        start = time.perf_counter()
        piece.job.block.put(piece.begin, piece.slot.address, piece.size)
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


class Reader(StagedWorker):
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
        slot = self._ring[0]
        start = time.perf_counter()
        job.block.get(begin, slot.address, size)
        slot.move = self._mover.to_device(job.mark, job.storage, begin, size, slot.address)
        self._busy_seconds += time.perf_counter() - start
        self._done_bytes += size
        self._ring = (*self._ring[1:], slot)


class StagedLanes(WorkerLanes):
    """The lanes between a device and such a tier.

    Args:
        mover: Copies between the device and the chunks; for these lanes alone.
        staging: Gives the chunks; called in the thread that asks for the first copy.
        name: The tier's, of which the threads are named.
        chunk_bytes: Their size, a multiple of :data:`ALIGNMENT`.
    """

    _out: Writer
    _in: Reader

    def __init__(
        self, mover: Mover, staging: Callable[[int], Slab] = Slab, name: str = "disk", *, chunk_bytes: int = CHUNK_BYTES
    ) -> None:
        assert chunk_bytes % ALIGNMENT == 0
        super().__init__(
            Writer(f"lightning-offload-{name}-out", mover, staging, chunk_bytes),
            Reader(f"lightning-offload-{name}-in", mover, staging, chunk_bytes),
        )
        self._mover = mover

    @override
    def swap_out(self, storage: torch.UntypedStorage, block: Block) -> Copy:
        users = block.after if block.busy is None else (*block.after, block.busy)
        block.after = ()
        copy = block.busy = block.written = HostCopy()
        self._out.submit(Job(self._mover.mark(), storage, block, copy, users))
        return copy

    @override
    def swap_in(self, block: Block, storage: torch.UntypedStorage) -> Copy:
        users = () if block.written is None else (block.written,)
        copy = block.busy = InwardCopy()
        self._in.submit(Job(self._mover.mark(), storage, block, copy, users))
        return copy

    @override
    def prepare(self) -> None:
        self._out.prepare()
        self._in.prepare()

    @override
    def measure(self, is_on: bool) -> None:
        self._mover.measure(is_on)

    @override
    def take_times(self) -> LaneTimes:
        return super().take_times()._replace(stall_seconds=self._mover.take_times().stall_seconds)

    @override
    def settle(self) -> None:
        super().settle()
        self._mover.settle()
