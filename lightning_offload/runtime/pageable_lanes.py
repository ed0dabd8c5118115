"""Lanes between an accelerator and host memory that could not be page-locked: see :mod:`~.staged_lanes`.

A device copies to and from pageable memory only while the host stands by. So bytes pass through page-locked chunks,
and threads of their own move them on while the device, and the thread that computes, do other things.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from typing_extensions import override

from lightning_offload.runtime.cpu_lanes import Job
from lightning_offload.runtime.host_pool import HostBlock
from lightning_offload.runtime.lanes import Block, Copy, HostCopy, Mover
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
        users = block.after if block.busy is None else (*block.after, block.busy)
        block.after = ()
        copy = block.busy = HostCopy()
        self._out.submit(Job(self._mover.mark(), storage, block, copy, users))
        return copy

    @override
    def swap_in(self, block: Block, storage: torch.UntypedStorage) -> Copy:
        assert isinstance(block, HostBlock)
        # An earlier copy in came after the copy out as well, and this one comes after it.
        users = () if block.busy is None or isinstance(block.busy, InwardCopy) else (block.busy,)
        copy = block.busy = InwardCopy()
        self._in.submit(Job(self._mover.mark(), storage, block, copy, users))
        return copy
