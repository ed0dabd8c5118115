"""Lanes of a CPU: one worker thread for each direction, which copies outside the GIL.

Handing a small copy to a thread costs more than making it, so whoever asks for one makes it.

The worker, which the lanes of disks are made of as well, copies in order. A job holds a storage and a block until it
has ended, and lets go of both before it says so: who waits for the copy counts on being the last to hold them.

Forks: a child has no thread, so there whoever submits a job performs it.
"""

from __future__ import annotations

import abc
import os
import queue
import threading
import time
from typing import Any

import torch
from typing_extensions import override

from lightning_offload.runtime.lanes import (
    DONE,
    Block,
    Copy,
    CopyLanes,
    HostCopy,
    LaneTimes,
    done_copy,
    failed_copy,
    without_frames,
)
from lightning_offload.runtime.native_lanes import NativeLanes


class Job:
    """A copy to make.

    Attributes:
        mark: The point of compute that it comes after; None where copies and compute share a clock.
        storage: Device memory; only until it ends.
        block: What it is copied to or from; only until it ends.
        copy: What the other side waits for.
        users: Copies that it comes after.
        num_bytes: How many bytes it moves.
        error: Why it failed, if it did.
    """

    __slots__ = ("block", "copy", "error", "mark", "num_bytes", "storage", "users")

    def __init__(
        self, mark: Any, storage: torch.UntypedStorage, block: Block, copy: HostCopy, users: tuple[Copy, ...] = ()
    ) -> None:
        self.mark = mark
        self.storage = storage
        self.block = block
        self.num_bytes = block.num_bytes
        self.copy = copy
        self.users = users
        self.error: BaseException | None = None

    def fail(self, error: BaseException) -> None:
        """Note why it fails."""
        if self.error is None:
            self.error = without_frames(error)

    def end(self) -> None:
        """Let go of both sides, then tell who waits."""
        del self.storage, self.block
        self.copy.finish(self.error)


class Worker(abc.ABC):
    """Takes jobs in order; without a thread, the one that submits them performs them.

    Args:
        name: The thread's name.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._last = done_copy()
        self._pid = os.getpid()
        self._done_bytes = 0
        self._busy_seconds = 0.0

    def submit(self, job: Job) -> None:
        """Have a copy made.

        Raises:
            BaseException: What is no failure of the copy but interrupts this very thread, where it makes it.
        """
        self._leave_parent()
        if self._is_closed:
            self._perform(job)
            self._finish()
            if job.error is not None and not isinstance(job.error, Exception):
                raise job.error
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        self._last = job.copy
        self._jobs.put(job)

    def take(self) -> tuple[int, float]:
        """Bytes copied and seconds spent on them since this was last asked."""
        self.drain()
        taken = self._done_bytes, self._busy_seconds
        self._done_bytes, self._busy_seconds = 0, 0.0
        return taken

    def settle(self) -> None:
        """Wait until no job holds device memory."""
        if not self._last.is_done:
            self._leave_parent()
            self._last.ended()

    def drain(self) -> None:
        """Wait until nothing is under way."""
        self._leave_parent()
        self._last.settle()

    def close(self) -> None:
        """End the thread, once it has made what was submitted."""
        self._leave_parent()
        self._is_closed = True
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None

    def _leave_parent(self) -> None:
        if os.getpid() != self._pid:
            self._pid, self._is_closed, self._thread, self._last = os.getpid(), True, None, done_copy()
            self._forked()

    def _forked(self) -> None:  # noqa: B027  (some have nothing)
        """Forget what belongs to the parent."""

    def _work(self) -> None:
        while (job := self._next()) is not None:
            self._perform(job)
            del job
        self._finish()

    def _next(self) -> Job | None:
        return self._jobs.get()

    @abc.abstractmethod
    def _perform(self, job: Job) -> None:
        """Make a copy and end its job; raises nothing."""

    def _finish(self) -> None:  # noqa: B027  (most leave nothing)
        """End what :meth:`_perform` left open."""


SMALL_BYTES = 192 << 10
"""Up to here the thread that asks for a copy makes it.

Handing one over takes 50 to 160 microseconds of the thread's time whatever its size, as long as copying 256 KiB
(measured on two cores, between products of 0.3 ms).
"""

HANDOVER_SECONDS = 50e-6
"""What plans count for handing a copy over."""


class WorkerLanes(CopyLanes):
    """Lanes of a worker thread for each direction.

    Args:
        out: Copies out.
        back: Copies in.
    """

    def __init__(self, out: Worker, back: Worker) -> None:
        self._out, self._in = out, back

    @override
    def take_times(self) -> LaneTimes:
        return LaneTimes(*self._out.take(), *self._in.take())

    @override
    def settle(self) -> None:
        self._out.settle()
        self._in.settle()

    @override
    def drain(self) -> None:
        self._out.drain()
        self._in.drain()

    @override
    def close(self) -> None:
        self._out.close()
        self._in.close()


class CpuLanes(WorkerLanes):
    """The lanes of a CPU: a worker thread for each direction."""

    small_bytes = SMALL_BYTES
    _out: _CpuWorker
    _in: _CpuWorker

    def __init__(self) -> None:
        super().__init__(
            _CpuWorker("lightning-offload-swap-out", is_out=True), _CpuWorker("lightning-offload-swap-in", is_out=False)
        )

    @override
    def in_core(self, core: Any) -> CopyLanes | None:
        return NativeLanes(core.Lanes(DONE, SMALL_BYTES), self)

    @override
    def swap_out(self, storage: torch.UntypedStorage, block: Block) -> Copy:
        return self._out.copy(storage, block)

    @override
    def swap_in(self, block: Block, storage: torch.UntypedStorage) -> Copy:
        return self._in.copy(storage, block)


class _CpuWorker(Worker):
    def __init__(self, name: str, *, is_out: bool) -> None:
        super().__init__(name)
        self._is_out = is_out
        self._small_bytes = 0  # apart from the thread's, which adds to its own at the same time
        self._small_seconds = 0.0

    def copy(self, storage: torch.UntypedStorage, block: Block) -> Copy:
        """Have a copy made, or make it where it is small.

        Nothing under way has to do with a small copy: a lane's user waits for what fills a storage or a block before
        it asks for the next copy of either, and a block is handed out again only when its last copy has ended.
        """
        if block.num_bytes <= SMALL_BYTES:
            return self._copy_small(storage, block)
        copy = HostCopy()
        self.submit(Job(None, storage, block, copy))
        return copy

    def _transfer(self, storage: torch.UntypedStorage, block: Block) -> None:
        (block.put if self._is_out else block.get)(0, storage.data_ptr(), block.num_bytes)

    def _copy_small(self, storage: torch.UntypedStorage, block: Block) -> Copy:
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
    def _perform(self, job: Job) -> None:
        start = time.perf_counter()
        try:
            self._transfer(job.storage, job.block)
        except BaseException as error:  # reported to the thread that waits
            job.fail(error)
        self._busy_seconds += time.perf_counter() - start
        self._done_bytes += job.num_bytes
        job.end()
