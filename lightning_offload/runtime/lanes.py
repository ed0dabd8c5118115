"""Copies between the device and host memory, off the compute thread: the one seam between runtime and hardware.

A lane takes copies in order and gives a :class:`Copy` to wait for. The source of a copy must stay
unchanged until its copy is done, which the executor sees to; device memory is always allocated by the compute
thread. :class:`~.cpu_lanes.CpuLanes` copy in worker threads that hold no GIL, so that every path of the runtime
runs on any machine; :class:`~.stream_lanes.StreamLanes` copy on side streams of an accelerator;
:class:`~.staged_lanes.StagedLanes` reach a spill file, and memory that could not be page-locked, through a little host
memory that a device can reach; :class:`FakeLanes` move nothing and serve FakeTensor steps.

Under every lane is a :class:`Mover`: the primitive that moves ranges of bytes between device memory and host memory.
A mover belongs to one device and serves one lane of each direction. ``mark`` is called by the thread that computes
and stands for all that compute was asked to do so far; the moves may be made by another thread, and happen after
their mark.

A :class:`Copy` is waited for in two ways: ``wait`` lets *compute* go on only after it (on a device with streams
that blocks no thread), ``synchronize`` blocks the calling thread until the bytes are there. A :class:`Block` goes
back to its pool when the last reference to it goes, perhaps while a copy still uses its memory: the pool then
hands that copy on to whoever gets the memory next, and lanes order their copies after it.
"""

from __future__ import annotations

import abc
import contextlib
import ctypes
import threading
import time
from collections import deque
from typing import Any, NamedTuple

import torch
from typing_extensions import override

from lightning_offload.errors import SpillError
from lightning_offload.runtime.hooks import dynamo_disabled
from lightning_offload.tensors.geometry import plain_set


class LaneTimes(NamedTuple):
    """What lanes did since they were last asked.

    Attributes:
        out_bytes: Bytes copied off the device.
        out_seconds: Time that took, waiting in the lane aside.
        in_bytes: Bytes copied to the device.
        in_seconds: Time that took, waiting in the lane aside.
        stall_seconds: Time for which compute waited, where the lane itself has to measure it.
    """

    out_bytes: int = 0
    out_seconds: float = 0.0
    in_bytes: int = 0
    in_seconds: float = 0.0
    stall_seconds: float = 0.0

    def added(self, other: LaneTimes) -> LaneTimes:
        """What these lanes and others of the same tier did."""
        return LaneTimes._make(map(sum, zip(self, other, strict=True)))


class CopyLanes(abc.ABC):
    """The two copy directions of a device.

    Attributes:
        small_bytes: Copies of at most so many bytes are made by the thread that asks for them; None where none are.
    """

    small_bytes: int | None = None

    @abc.abstractmethod
    def swap_out(self, storage: torch.UntypedStorage, block: Block) -> Copy:
        """Start copying a device storage to a block."""

    @abc.abstractmethod
    def swap_in(self, block: Block, storage: torch.UntypedStorage) -> Copy:
        """Start copying a block to a device storage."""

    def in_core(self, core: Any) -> CopyLanes | None:
        """Lanes that do the same from now on, in the native core as far as it can; None where it cannot at all.

        Args:
            core: The core.
        """
        return None

    def prepare(self) -> None:  # noqa: B027  (most lanes need nothing)
        """Have what copies need besides both ends, before there is one.

        Raises:
            OSError: The host refused memory for it.
            MemoryError: There was none left.
        """

    def compute_stream(self) -> Any:
        """The stream on which the calling thread's ops run now; None on a device without streams."""
        return None

    def note_use(self, storage: torch.UntypedStorage) -> None:  # noqa: B027  (there is nothing to tell without streams)
        """Tell the allocator that ops of the calling thread use memory, which may be another stream's."""

    def come_after(self, stream: Any) -> None:  # noqa: B027  (one after the other without streams)
        """Let what the calling thread computes from now on come after what a stream was asked for so far."""

    def tidy(self) -> None:  # noqa: B027  (most lanes hold nothing longer than they must)
        """Let go of the memory of copies that are done by now."""

    def measure(self, is_on: bool) -> None:  # noqa: B027  (most lanes measure at no cost)
        """Whether the copies from now on should be timed, where that costs something."""

    def take_times(self) -> LaneTimes:
        """What the lanes did since this was last asked; waits for what is still under way."""
        return LaneTimes()

    def settle(self) -> None:  # noqa: B027  (most lanes have nothing under way)
        """Wait for the copies that hold device memory though nobody will wait for them any more.

        They are few: what they copy was dropped before it was read. Compute that was told to wait goes on without
        this thread.
        """

    def drain(self) -> None:  # noqa: B027  (most lanes have nothing under way)
        """Wait until no copy is under way and no lane holds memory."""

    def close(self) -> None:  # noqa: B027  (most lanes have nothing to end)
        """End threads; copies asked for later are made by the thread that asks."""


class FakeLanes(CopyLanes):
    """Lanes for FakeTensor steps, where there is nothing to copy."""

    @override
    def swap_out(self, storage: torch.UntypedStorage, block: Block) -> Copy:
        return DONE

    @override
    def swap_in(self, block: Block, storage: torch.UntypedStorage) -> Copy:
        return DONE


class Mover(abc.ABC):
    """Moves ranges of bytes between the memory of one device and host memory."""

    @abc.abstractmethod
    def mark(self) -> Any:
        """The point that compute has reached."""

    @abc.abstractmethod
    def to_host(self, mark: Any, storage: torch.UntypedStorage, offset: int, num_bytes: int, address: int) -> Copy:
        """Start copying bytes of a device storage to host memory.

        Args:
            mark: What the copy comes after.
            storage: Device memory, which must stay unchanged until the copy is done; the mover holds it until then.
            offset: First byte of the storage.
            num_bytes: How many.
            address: Host memory; must live until the copy is done.
        """

    @abc.abstractmethod
    def to_device(self, mark: Any, storage: torch.UntypedStorage, offset: int, num_bytes: int, address: int) -> Copy:
        """Start copying host memory to bytes of a device storage; arguments as in :meth:`to_host`."""

    def begin_thread(self) -> None:  # noqa: B027  (memory of the CPU is every thread's)
        """Called first in a thread that is there to ask for moves."""

    def settle(self) -> None:  # noqa: B027  (copies of a thread have ended with it)
        """Wait for the moves that hold device memory and that compute was never told to wait for."""

    def measure(self, is_on: bool) -> None:  # noqa: B027  (nothing to measure where no stream waits)
        """Whether the times for which compute streams wait should be measured."""

    def take_times(self) -> LaneTimes:
        """What it did since this was last asked; the copies themselves count how long threads wait."""
        return LaneTimes()


class CpuMover(Mover):
    """Copies by the calling thread, outside the GIL; they have ended when the call returns."""

    @override
    def mark(self) -> None:
        return None

    @override
    def to_host(self, mark: Any, storage: torch.UntypedStorage, offset: int, num_bytes: int, address: int) -> Copy:
        ctypes.memmove(address, storage.data_ptr() + offset, num_bytes)
        return DONE

    @override
    def to_device(self, mark: Any, storage: torch.UntypedStorage, offset: int, num_bytes: int, address: int) -> Copy:
        ctypes.memmove(storage.data_ptr() + offset, address, num_bytes)
        return DONE


def storage_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """A storage as a flat tensor of bytes."""
    flat = torch.empty(0, dtype=torch.uint8, device=storage.device)
    plain_set(flat, storage, 0, (storage.nbytes(),), (1,))
    return flat


def memory_bytes(address: int, num_bytes: int) -> torch.Tensor:
    """Host memory as a flat tensor of bytes, which does not keep it alive."""
    return torch.frombuffer((ctypes.c_char * num_bytes).from_address(address), dtype=torch.uint8)


class Copy(abc.ABC):
    """A copy under way."""

    __slots__ = ()

    @property
    @abc.abstractmethod
    def is_done(self) -> bool:
        """Whether the bytes are there; never blocks."""

    @abc.abstractmethod
    def wait(self) -> float:
        """Let what compute does from here on see the copy as done.

        Returns:
            Seconds for which the calling thread was blocked.

        Raises:
            SpillError: The copy failed.
        """

    @abc.abstractmethod
    def synchronize(self) -> None:
        """Block until the copy is done.

        Raises:
            SpillError: The copy failed.
        """

    def settle(self) -> None:
        """Block until the copy is done or has failed."""
        with contextlib.suppress(SpillError):
            self.synchronize()


class HostCopy(Copy):
    """A copy that a thread of this process makes.

    Attributes:
        error: Why it failed, if it did.
    """

    __slots__ = ("_done", "error")

    def __init__(self) -> None:
        self._done = threading.Event()
        self.error: BaseException | None = None

    def finish(self, error: BaseException | None = None) -> None:
        """Mark the copy as done, or as failed."""
        self.error = error
        self._done.set()

    @property
    @override
    def is_done(self) -> bool:
        return self._done.is_set()

    @override
    def wait(self) -> float:
        if self._done.is_set() and self.error is None:
            return 0.0
        start = time.perf_counter()
        self.synchronize()
        return time.perf_counter() - start

    @override
    def synchronize(self) -> None:
        self._done.wait()
        if self.error is not None:
            raise SpillError(f"a copy between tiers failed: {self.error}") from self.error

    def ended(self) -> None:
        """Block until the thread that makes it has let go of both sides."""
        self._done.wait()

    @override
    def settle(self) -> None:
        self._done.wait()


def without_frames(error: BaseException) -> BaseException:
    """An error that does not keep the storages of the frames it went through."""
    link: BaseException | None = error
    while link is not None:
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
    return error


def done_copy() -> HostCopy:
    """A copy that is done."""
    return failed_copy(None)


def failed_copy(error: BaseException | None) -> HostCopy:
    """A copy that is over, and has failed if there is an error."""
    copy = HostCopy()
    copy.finish(error)
    return copy


DONE = done_copy()
"""A copy that is done; any number of them, since it never changes."""


Returned = deque[tuple[Any, int, int, Copy | None]]
"""Ranges of dropped blocks: of what, from where, how many bytes, and the last copy that uses them."""


class Block(abc.ABC):
    """A range of a lower tier, of host memory or of a file, that goes back to its pool when it is dropped.

    Args:
        owner: What it is a range of.
        offset: Where it begins there, in bytes.
        num_bytes: Its size as asked for.
        size: What it takes there, in bytes.
        returned: Where its pool finds it again; a finalizer appends to it, in any thread.
        after: Copies of its memory's earlier users that may still be under way.

    Attributes:
        owner: What it is a range of.
        offset: Where it begins there, in bytes.
        num_bytes: Its size as asked for.
        size: What it takes there, in bytes.
        after: Copies of its memory's earlier users that may still be under way.
        busy: The latest copy that fills or reads it.
        written: The latest copy that fills it, where that is not one of a stream.
    """

    __slots__ = ("_returned", "after", "busy", "num_bytes", "offset", "owner", "size", "written")

    def __init__(
        self,
        owner: Any,
        offset: int,
        num_bytes: int,
        size: int,
        returned: Returned,
        after: tuple[Copy, ...],
    ) -> None:
        self.owner = owner
        self.size = size
        self._returned = returned
        self.offset = offset
        self.num_bytes = num_bytes
        self.after = after
        self.busy: Copy | None = None
        self.written: Copy | None = None

    @dynamo_disabled
    def __del__(self) -> None:
        self._returned.append((self.owner, self.offset, self.size, self.busy))

    @abc.abstractmethod
    def put(self, begin: int, address: int, num_bytes: int) -> None:
        """Fill a part of it from host memory.

        Args:
            begin: The part's first byte; a multiple of :data:`~.spill_file.ALIGNMENT`, and so is the address.
            address: The memory, with room up to the next multiple of it.
            num_bytes: How many.

        Raises:
            SpillError: It could not be written.
        """

    @abc.abstractmethod
    def get(self, begin: int, address: int, num_bytes: int) -> None:
        """Copy a part of it to host memory; arguments as in :meth:`put`.

        Raises:
            SpillError: It could not be read.
        """
