"""What the disk lanes' workers work on: the chunks that bytes pass through, and the copies they answer for."""

from __future__ import annotations

import ctypes
import mmap
import time
from typing import Protocol

from typing_extensions import override

from lightning_offload.runtime.copies import Copy, HostCopy, done_copy, without_frames
from lightning_offload.runtime.spill import DiskBlock
from lightning_offload.runtime.worker import Job


class HostChunk(Protocol):
    """Host memory that lives as long as this object."""

    @property
    def address(self) -> int:
        """Where it begins: a multiple of :data:`ALIGNMENT`."""


class PlainChunk:
    """Host memory as it comes.

    Args:
        num_bytes: Its size.

    Attributes:
        address: Where it begins.
    """

    def __init__(self, num_bytes: int) -> None:
        self._memory = mmap.mmap(-1, num_bytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))


class Slot:
    """A chunk of the ring.

    Attributes:
        address: Where its memory begins.
        move: The latest move from or to it.
    """

    def __init__(self, chunk: HostChunk) -> None:
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
        self.settle_reads()
        for move in self.moves:
            settled(move)

    def settle_reads(self) -> None:
        """Block until it uses the file no more, though the device may still wait for its bytes."""
        super().settle()


DiskJob = Job[DiskBlock]


def settled(copy: Copy) -> BaseException | None:
    """Block until a copy is done or has failed, and say why."""
    try:
        copy.synchronize()
    except BaseException as error:
        return without_frames(error)
    return None
