"""Lanes of a CPU: one worker thread for each direction, which copies outside the GIL."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable

import torch
from typing_extensions import override

from lightning_offload.runtime.copies import Block, Copy, HostCopy, done_copy, without_frames
from lightning_offload.runtime.host_pool import HostBlock
from lightning_offload.runtime.lanes import Lanes, LaneTimes
from lightning_offload.runtime.movers import CpuMover

Transfer = Callable[[torch.UntypedStorage, HostBlock], None]


class CpuLanes(Lanes):
    """See the module's docstring."""

    def __init__(self) -> None:
        self._out = _Worker("lightning-offload-swap-out", copy_out)
        self._in = _Worker("lightning-offload-swap-in", copy_in)

    @override
    def swap_out(self, storage: torch.UntypedStorage, block: Block) -> Copy:
        assert isinstance(block, HostBlock)
        return self._out.submit(storage, block)

    @override
    def swap_in(self, block: Block, storage: torch.UntypedStorage) -> Copy:
        assert isinstance(block, HostBlock)
        return self._in.submit(storage, block)

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


_Job = tuple[torch.UntypedStorage, HostBlock, HostCopy]


class _Worker:
    def __init__(self, name: str, transfer: Transfer) -> None:
        self._name = name
        self._transfer = transfer
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._last = done_copy()
        self._pid = os.getpid()
        self._done_bytes = 0
        self._busy_seconds = 0.0

    def submit(self, storage: torch.UntypedStorage, block: HostBlock) -> Copy:
        self._leave_parent()
        if self._is_closed:
            self._transfer(storage, block)
            return done_copy()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        copy = self._last = HostCopy()
        self._jobs.put((storage, block, copy))
        return copy

    def take(self) -> tuple[int, float]:
        self.drain()
        taken = self._done_bytes, self._busy_seconds
        self._done_bytes, self._busy_seconds = 0, 0.0
        return taken

    def drain(self) -> None:
        self._leave_parent()
        self._last.settle()

    def _leave_parent(self) -> None:
        """In a fork there is no thread any more: copy inline."""
        if os.getpid() != self._pid:
            self._pid, self._is_closed, self._thread, self._last = os.getpid(), True, None, done_copy()

    def close(self) -> None:
        self._leave_parent()
        self._is_closed = True
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            storage, block, copy = job
            error: BaseException | None = None
            start = time.perf_counter()
            try:
                self._transfer(storage, block)
            except BaseException as caught:  # reported to the thread that waits
                error = without_frames(caught)  # which would hold the storage
            self._busy_seconds += time.perf_counter() - start
            self._done_bytes += block.num_bytes
            # Drop the storage before the waiting thread goes on: it counts on being the last to hold it.
            del job, storage, block
            copy.finish(error)
            del copy
