"""Lanes of a CPU: one worker thread for each direction, which copies outside the GIL.

Handing a small copy to a thread costs more than making it, so whoever asks for one makes it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from typing_extensions import override

from lightning_offload.runtime.copies import DONE, Block, Copy, HostCopy, failed_copy, without_frames
from lightning_offload.runtime.host_pool import HostBlock
from lightning_offload.runtime.lanes import Lanes, LaneTimes
from lightning_offload.runtime.movers import CpuMover
from lightning_offload.runtime.worker import Job, Worker

SMALL_BYTES = 16 << 10
"""Up to here the thread that asks for a copy makes it; chosen by judgement, other sizes were not compared."""

Transfer = Callable[[torch.UntypedStorage, HostBlock], None]


class CpuLanes(Lanes):
    """See the module's docstring."""

    def __init__(self) -> None:
        self._out = _CpuWorker("lightning-offload-swap-out", copy_out)
        self._in = _CpuWorker("lightning-offload-swap-in", copy_in)

    @override
    def swap_out(self, storage: torch.UntypedStorage, block: Block) -> Copy:
        assert isinstance(block, HostBlock)
        return self._out.copy(storage, block)

    @override
    def swap_in(self, block: Block, storage: torch.UntypedStorage) -> Copy:
        assert isinstance(block, HostBlock)
        return self._in.copy(storage, block)

    @override
    def take_times(self) -> LaneTimes:
        out_bytes, out_seconds = self._out.take()
        in_bytes, in_seconds = self._in.take()
        return LaneTimes(out_bytes=out_bytes, out_seconds=out_seconds, in_bytes=in_bytes, in_seconds=in_seconds)

    @override
    def drain(self) -> None:
        self._out.drain()
        self._in.drain()

    @override
    def close(self) -> None:
        self._out.close()
        self._in.close()


_MOVER = CpuMover()


def copy_out(storage: torch.UntypedStorage, block: HostBlock) -> None:
    """Copy CPU memory to a block, in the calling thread."""
    _MOVER.to_host(None, storage, 0, block.num_bytes, block.address)


def copy_in(storage: torch.UntypedStorage, block: HostBlock) -> None:
    """Copy a block to CPU memory, in the calling thread."""
    _MOVER.to_device(None, storage, 0, block.num_bytes, block.address)


class _CpuWorker(Worker[HostBlock]):
    def __init__(self, name: str, transfer: Transfer) -> None:
        super().__init__(name)
        self._transfer = transfer
        self._small_bytes = 0  # apart from the thread's, which adds to its own at the same time
        self._small_seconds = 0.0

    def copy(self, storage: torch.UntypedStorage, block: HostBlock) -> Copy:
        """Have a copy made, or make it where it is small.

        Nothing under way has to do with a small copy: a lane's user waits for what fills a storage or a block before
        it asks for the next copy of either, and a block is handed out again only when its last copy has ended.
        """
        if block.num_bytes <= SMALL_BYTES:
            return self._copy_small(storage, block)
        copy = HostCopy()
        self.submit(Job(None, storage, block, copy))
        return copy

    def _copy_small(self, storage: torch.UntypedStorage, block: HostBlock) -> Copy:
        start = time.perf_counter()
        try:
            self._transfer(storage, block)
        except Exception as error:  # reported to the thread that waits, as that of a large copy is
            return failed_copy(without_frames(error))
        finally:
            self._small_seconds += time.perf_counter() - start
            self._small_bytes += block.num_bytes
        return DONE

    @override
    def take(self) -> tuple[int, float]:
        num_bytes, seconds = super().take()
        num_bytes, seconds = num_bytes + self._small_bytes, seconds + self._small_seconds
        self._small_bytes, self._small_seconds = 0, 0.0
        return num_bytes, seconds

    @override
    def _perform(self, job: Job[HostBlock]) -> None:
        start = time.perf_counter()
        try:
            self._transfer(job.storage, job.block)
        except BaseException as error:  # reported to the thread that waits
            job.fail(error)
        self._busy_seconds += time.perf_counter() - start
        self._done_bytes += job.num_bytes
        job.end()
