"""Lanes between an accelerator and host memory that could not be page-locked: see :mod:`~.staged_lanes`.

A device copies to and from pageable memory only while the host stands by. So bytes pass through page-locked chunks,
and threads of their own move them on while the device, and the thread that computes, do other things.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from typing_extensions import override

from lightning_offload.runtime.host_pool import HostBlock
from lightning_offload.runtime.lanes import Block, Copy, Mover
from lightning_offload.runtime.staged_lanes import CHUNK_BYTES, HostChunk, InwardCopy, Reader, StagedLanes, Writer


class _MemoryWriter(Writer[HostBlock]):
    @override
    def _store(self, block: HostBlock, begin: int, address: int, num_bytes: int) -> None:
        ctypes.memmove(block.address + begin, address, num_bytes)


class _MemoryReader(Reader[HostBlock]):
    @override
    def _load(self, block: HostBlock, begin: int, address: int, num_bytes: int) -> None:
        ctypes.memmove(address, block.address + begin, num_bytes)


class PageableLanes(StagedLanes[HostBlock]):
    """The lanes between an accelerator and pageable memory: two threads, and a few page-locked chunks.

    Args:
        mover: Copies between the device and the chunks; for these lanes alone.
        staging: Gives the chunks; called in the thread that asks for the first copy.
        chunk_bytes: Their size.
    """

    def __init__(self, mover: Mover, staging: Callable[[int], HostChunk], *, chunk_bytes: int = CHUNK_BYTES) -> None:
        super().__init__(
            mover,
            _MemoryWriter("lightning-offload-pageable-out", mover, staging, chunk_bytes),
            _MemoryReader("lightning-offload-pageable-in", mover, staging, chunk_bytes),
        )

    @override
    def swap_out(self, storage: torch.UntypedStorage, block: Block) -> Copy:
        assert isinstance(block, HostBlock)
        return self._write(storage, block)

    @override
    def swap_in(self, block: Block, storage: torch.UntypedStorage) -> Copy:
        assert isinstance(block, HostBlock)
        # An earlier copy in came after the copy out as well, and this one comes after it.
        return self._read(storage, block, () if isinstance(block.busy, InwardCopy | None) else (block.busy,))
