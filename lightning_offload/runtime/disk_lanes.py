"""Lanes between a device and a spill file, through a little host memory: see :mod:`~.staged_lanes`."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable

import torch
from typing_extensions import override

from lightning_offload.errors import SpillError
from lightning_offload.runtime.lanes import Block, Copy, Mover
from lightning_offload.runtime.spill import DiskBlock
from lightning_offload.runtime.spill_file import ALIGNMENT
from lightning_offload.runtime.staged_lanes import CHUNK_BYTES, HostChunk, Reader, StagedLanes, Writer


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


class _DiskWriter(Writer[DiskBlock]):
    """Copies to the file. In a fork the file refuses, so copies fail there."""

    @override
    def _store(self, block: DiskBlock, begin: int, address: int, num_bytes: int) -> None:
        try:
            block.file.write(address, _padded(num_bytes), block.offset + begin)
        except SpillError as error:
            block.pool.fail(error)
            raise


class _DiskReader(Reader[DiskBlock]):
    """Copies from the file."""

    @override
    def _load(self, block: DiskBlock, begin: int, address: int, num_bytes: int) -> None:
        block.file.read(address, _padded(num_bytes), block.offset + begin)


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


class DiskLanes(StagedLanes[DiskBlock]):
    """The lanes between a device and a spill file: two threads, and a few chunks of host memory.

    Args:
        mover: Copies between the device and host memory; for these lanes alone.
        staging: Gives the chunks; called in the thread that asks for the first copy.
        chunk_bytes: Their size, a multiple of :data:`ALIGNMENT`.
    """

    def __init__(
        self, mover: Mover, staging: Callable[[int], HostChunk] = PlainChunk, *, chunk_bytes: int = CHUNK_BYTES
    ) -> None:
        assert chunk_bytes % ALIGNMENT == 0
        super().__init__(
            mover,
            _DiskWriter("lightning-offload-disk-write", mover, staging, chunk_bytes),
            _DiskReader("lightning-offload-disk-read", mover, staging, chunk_bytes),
        )

    @override
    def swap_out(self, storage: torch.UntypedStorage, block: Block) -> Copy:
        assert isinstance(block, DiskBlock)
        copy = block.written = self._write(storage, block)
        return copy

    @override
    def swap_in(self, block: Block, storage: torch.UntypedStorage) -> Copy:
        assert isinstance(block, DiskBlock)
        return self._read(storage, block, () if block.written is None else (block.written,))
