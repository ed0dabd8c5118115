"""Copies between the device and host memory, off the compute thread: the one seam between runtime and hardware.

A lane takes copies in order and gives a :class:`Copy` to wait for. The source of a copy must stay unchanged and
alive until its copy is done, which the executor sees to; device memory is always allocated by the compute
thread. :class:`CpuLanes` copy in worker threads that hold no GIL, so that every path of the runtime runs on any
machine; :class:`BlockingLanes` serve any other device, one copy at a time on its current stream;
:class:`FakeLanes` move nothing and serve FakeTensor steps.
"""

from __future__ import annotations

import abc
import ctypes
import queue
import threading

import torch
from typing_extensions import override

from lightning_offload.runtime.host_pool import HostBlock


class Copy:
    """A copy under way."""

    __slots__ = ("_done", "error")

    def __init__(self) -> None:
        self._done = threading.Event()
        self.error: BaseException | None = None

    def finish(self, error: BaseException | None = None) -> None:
        """Mark the copy as done, or as failed."""
        self.error = error
        self._done.set()

    @property
    def is_done(self) -> bool:
        """Whether waiting would return at once."""
        return self._done.is_set()

    def wait(self) -> None:
        """Block until the copy is done.

        Raises:
            RuntimeError: The copy failed.
        """
        self._done.wait()
        if self.error is not None:
            raise RuntimeError(f"a copy between device and host failed: {self.error}") from self.error


class Lanes(abc.ABC):
    """The two copy directions of a device."""

    @abc.abstractmethod
    def swap_out(self, storage: torch.UntypedStorage, block: HostBlock) -> Copy:
        """Start copying a device storage to a host block."""

    @abc.abstractmethod
    def swap_in(self, block: HostBlock, storage: torch.UntypedStorage) -> Copy:
        """Start copying a host block to a device storage."""

    def drain(self) -> None:  # noqa: B027  (most lanes have nothing under way)
        """Wait until no copy is under way and no lane holds memory."""

    def close(self) -> None:  # noqa: B027  (most lanes have nothing to end)
        """End threads; copies asked for later are made by the thread that asks."""


class CpuLanes(Lanes):
    """One worker thread for each direction; copies run outside the GIL."""

    def __init__(self) -> None:
        self._out = _Worker("lightning-offload-swap-out")
        self._in = _Worker("lightning-offload-swap-in")

    @override
    def swap_out(self, storage: torch.UntypedStorage, block: HostBlock) -> Copy:
        return self._out.submit(storage, block, to_host=True)

    @override
    def swap_in(self, block: HostBlock, storage: torch.UntypedStorage) -> Copy:
        return self._in.submit(storage, block, to_host=False)

    @override
    def drain(self) -> None:
        self._out.drain()
        self._in.drain()

    @override
    def close(self) -> None:
        self._out.close()
        self._in.close()


_Job = tuple[torch.UntypedStorage, HostBlock, bool, Copy]


class _Worker:
    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._last = _done()

    def submit(self, storage: torch.UntypedStorage, block: HostBlock, *, to_host: bool) -> Copy:
        if self._is_closed:
            copy_bytes(storage, block, to_host=to_host)
            return _done()
        if self._thread is None:
            self._thread = threading.Thread(target=_work, args=(self._jobs,), name=self._name, daemon=True)
            self._thread.start()
        copy = self._last = Copy()
        self._jobs.put((storage, block, to_host, copy))
        return copy

    def drain(self) -> None:
        self._last._done.wait()

    def close(self) -> None:
        self._is_closed = True
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None


def _work(jobs: queue.SimpleQueue[_Job | None]) -> None:
    while (job := jobs.get()) is not None:
        storage, block, to_host, copy = job
        error: BaseException | None = None
        try:
            copy_bytes(storage, block, to_host=to_host)
        except BaseException as caught:  # reported to the thread that waits
            error = caught
        # Drop the storage before the waiting thread goes on: it counts on being the last to hold it.
        del job, storage, block
        copy.finish(error)
        del copy


def copy_bytes(storage: torch.UntypedStorage, block: HostBlock, *, to_host: bool) -> None:
    """Copy between CPU memory and a block, in the calling thread."""
    source, target = storage.data_ptr(), block.address
    if not to_host:
        source, target = target, source
    ctypes.memmove(target, source, block.num_bytes)


class BlockingLanes(Lanes):
    """Copies on the device's current stream that have ended when they return."""

    @override
    def swap_out(self, storage: torch.UntypedStorage, block: HostBlock) -> Copy:
        host_bytes(block).copy_(device_bytes(storage))
        return _done()

    @override
    def swap_in(self, block: HostBlock, storage: torch.UntypedStorage) -> Copy:
        device_bytes(storage).copy_(host_bytes(block))
        return _done()


class FakeLanes(Lanes):
    """Lanes for FakeTensor steps, where there is nothing to copy."""

    @override
    def swap_out(self, storage: torch.UntypedStorage, block: HostBlock) -> Copy:
        return _done()

    @override
    def swap_in(self, block: HostBlock, storage: torch.UntypedStorage) -> Copy:
        return _done()


def _done() -> Copy:
    copy = Copy()
    copy.finish()
    return copy


def device_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """A storage as a flat tensor of bytes."""
    flat = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return flat.set_(storage, 0, (storage.nbytes(),), (1,))


def host_bytes(block: HostBlock) -> torch.Tensor:
    """A block as a flat tensor of bytes."""
    return torch.frombuffer((ctypes.c_char * block.num_bytes).from_address(block.address), dtype=torch.uint8)


def lanes_for(device: torch.device) -> Lanes:
    """The lanes of a device."""
    return CpuLanes() if device.type == "cpu" else BlockingLanes()
