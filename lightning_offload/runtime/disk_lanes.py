"""Lanes between a device and a spill file, through a little host memory.

Bytes pass through rings of two page-aligned chunks, one ring for each direction, so that one chunk is on its way
between device and memory while the other is on its way between memory and disk. What a device needs of its host
memory (page locks, say) is the business of whoever gives the chunks. How the copies are ordered: see
:mod:`~.disk_workers`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from typing_extensions import override

from lightning_offload.runtime.copies import Block, Copy, HostCopy
from lightning_offload.runtime.disk_jobs import DiskJob, HostChunk, InwardCopy, PlainChunk
from lightning_offload.runtime.disk_workers import Reader, Writer
from lightning_offload.runtime.lanes import Lanes, LaneTimes
from lightning_offload.runtime.movers import Mover
from lightning_offload.runtime.spill import DiskBlock
from lightning_offload.runtime.spill_file import ALIGNMENT

CHUNK_BYTES = 8 << 20
"""Large enough for a disk's full rate; four of them are all the host memory that the tier takes."""


class DiskLanes(Lanes):
    """See the module's docstring.

    Args:
        mover: Copies between the device and host memory; for these lanes alone.
        staging: Gives the chunks; called in the thread that asks for the first copy.
        chunk_bytes: Their size, a multiple of :data:`ALIGNMENT`.
    """

    def __init__(
        self, mover: Mover, staging: Callable[[int], HostChunk] = PlainChunk, *, chunk_bytes: int = CHUNK_BYTES
    ) -> None:
        assert chunk_bytes % ALIGNMENT == 0
        self._mover = mover
        self._writer = Writer("lightning-offload-disk-write", mover, staging, chunk_bytes)
        self._reader = Reader("lightning-offload-disk-read", mover, staging, chunk_bytes)

    @override
    def swap_out(self, storage: torch.UntypedStorage, block: Block) -> Copy:
        assert isinstance(block, DiskBlock)
        users = block.after if block.busy is None else (*block.after, block.busy)
        block.after = ()
        copy = block.busy = block.written = HostCopy()
        self._writer.submit(DiskJob(self._mover.mark(), storage, block, copy, users))
        return copy

    @override
    def swap_in(self, block: Block, storage: torch.UntypedStorage) -> Copy:
        assert isinstance(block, DiskBlock)
        users = () if block.written is None else (block.written,)
        copy = block.busy = InwardCopy()
        self._reader.submit(DiskJob(self._mover.mark(), storage, block, copy, users))
        return copy

    @override
    def prepare(self) -> None:
        self._writer.prepare()
        self._reader.prepare()

    @override
    def measure(self, is_on: bool) -> None:
        self._mover.measure(is_on)

    @override
    def take_times(self) -> LaneTimes:
        out_bytes, out_seconds = self._writer.take()
        in_bytes, in_seconds = self._reader.take()
        return LaneTimes(
            out_bytes=out_bytes,
            out_seconds=out_seconds,
            in_bytes=in_bytes,
            in_seconds=in_seconds,
            stall_seconds=self._mover.take_stall_seconds(),
        )

    @override
    def drain(self) -> None:
        self._writer.drain()
        self._reader.drain()

    @override
    def close(self) -> None:
        self._writer.close()
        self._reader.close()
