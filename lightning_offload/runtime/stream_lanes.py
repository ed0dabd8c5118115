"""Lanes of an accelerator: copies to and from page-locked host memory, on one side stream for each direction.

The side streams are ordered against compute by events. Host memory is used again only behind its earlier copies.

Note [streams and memory]: memory belongs to the stream it was allocated on. Swap-in buffers are allocated on the
compute stream, and the side stream waits for what compute had queued before it writes there. A swapped-out
tensor is held until compute has been made to wait for its copy; then compute's own order protects memory that was
allocated there. Memory of another stream, on which the program made what compute saved, is reported to the allocator
by ``record_stream``, which does nothing for a stream's own: plainly it would have stayed until backward. A copy that
nobody waits for is held by the lane until its event has passed. The compute stream is looked up at each call:
autograd's device threads and users' own stream contexts may have another one each time. Where a model computes on
several streams, memory goes back to the stream it was allocated on while another may still read it: that stream waits
for copies too, and what is read elsewhere is reported to the allocator, as autograd's users must do themselves. Each
stream that saves a tensor, or on which a replay reads one, is reported: plainly what is saved stays until backward, and
nothing is read again. Memory that a copy or a replay filled is read on another stream only after what filled it. What
leaves later than it was saved does so after the stream that saved it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from typing_extensions import override

from lightning_offload.accelerators import is_capturing
from lightning_offload.runtime.host_pool import HostBlock
from lightning_offload.runtime.lanes import (
    DONE,
    Block,
    Copy,
    CopyLanes,
    HostCopy,
    LaneTimes,
    Mover,
    memory_bytes,
    storage_bytes,
)
from lightning_offload.runtime.native_lanes import NativeLanes

_HIGH = -1  # priority; copies have no kernels, so they take nothing from compute's
_EVENT_SECONDS = 3e-6  # between two events with nothing between them


class StreamCopy(Copy):
    """A copy on a side stream.

    Attributes:
        storage: The device memory it uses, until it is done or compute waits for it.
    """

    __slots__ = ("_event", "_lanes", "_owner", "storage")

    def __init__(self, lanes: StreamLanes, event: Any, owner: Any, storage: torch.UntypedStorage) -> None:
        self._lanes = lanes
        self._event = event
        self._owner = owner
        self.storage: torch.UntypedStorage | None = storage

    @property
    @override
    def is_done(self) -> bool:
        return bool(self._event.query())

    @override
    def wait(self) -> float:
        self._lanes.let_compute_wait(self._event, self._owner)
        self.storage = None
        return 0.0

    @override
    def synchronize(self) -> None:
        self._event.synchronize()
        self.storage = None

    def gate(self, stream: Any) -> None:
        """Let a stream go on only after this copy."""
        stream.wait_event(self._event)


class StreamLanes(Mover, CopyLanes):
    """The lanes of an accelerator: a side stream for each direction. They move parts of storages for other lanes too.

    Args:
        device: The accelerator.

    Attributes:
        device: The accelerator.
        out_stream: The stream of copies to the host.
        in_stream: The stream of copies to the device.
        is_measuring: Whether copies and stalls are timed.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.out_stream = self.new_stream()
        self.in_stream = self.new_stream()
        self.is_measuring = False
        self._lock = threading.Lock()
        self._stalls: list[tuple[Any, Any]] = []
        self._out, self._in = _Direction(), _Direction()

    @override
    def in_core(self, core: Any) -> CopyLanes | None:
        self.drain()
        return NativeLanes(core.Lanes(DONE, self.out_stream, self.in_stream), self)

    @override
    def begin_thread(self) -> None:
        torch.accelerator.set_device_index(self.device)  # a new thread's is device 0, which would get a context too

    @override
    def swap_out(self, storage: torch.UntypedStorage, block: Block) -> Copy:
        assert isinstance(block, HostBlock)
        self._gate(block, self.out_stream)
        block.busy = self.to_host(self.mark(), storage, 0, block.num_bytes, block.address)
        return block.busy

    @override
    def swap_in(self, block: Block, storage: torch.UntypedStorage) -> Copy:
        assert isinstance(block, HostBlock)
        if isinstance(block.busy, StreamCopy):  # compute waited for the copy out, but perhaps on another stream
            block.busy.gate(self.in_stream)
        block.busy = self.to_device(self.mark(), storage, 0, block.num_bytes, block.address)
        return block.busy

    @override
    def mark(self) -> _Mark:
        stream, event = self.compute_stream(), self.new_event()
        event.record(stream)
        return _Mark(event, stream)

    @override
    def to_host(self, mark: Any, storage: torch.UntypedStorage, offset: int, num_bytes: int, address: int) -> Copy:
        with self._lock, self._on(self.out_stream, mark, num_bytes, self._out):
            self.copy(memory_bytes(address, num_bytes), _part(storage, offset, num_bytes))
            return self._issued(self.out_stream, mark, storage, self._out)

    @override
    def to_device(self, mark: Any, storage: torch.UntypedStorage, offset: int, num_bytes: int, address: int) -> Copy:
        with self._lock, self._on(self.in_stream, mark, num_bytes, self._in):
            self.copy(_part(storage, offset, num_bytes), memory_bytes(address, num_bytes))
            return self._issued(self.in_stream, mark, storage, self._in)

    # ---- the hardware, as far as it is asked for anything; tests put threads in its place

    def new_stream(self) -> Any:
        """A stream of this device, of its pool of high priority.

        torch makes no stream outside of its pools, whose streams it hands out in turn. A user's streams are of the
        other pool, unless asked for with a priority, so they do not come to wait for copies.
        """
        return torch.Stream(self.device, priority=_HIGH)

    def new_event(self, *, timing: bool = False) -> Any:
        """An event of this device."""
        return torch.Event(self.device, enable_timing=timing)

    @override
    def compute_stream(self) -> Any:
        return torch.accelerator.current_stream(self.device)

    @contextlib.contextmanager
    def on_stream(self, stream: Any) -> Iterator[None]:
        """Make a stream current for this thread, and its device, which is current only while it is.

        Not ``with stream``: a stream object keeps what was current before in itself, so two threads in one stream
        would leave each other on the wrong one.
        """
        device, before = torch.accelerator.current_device_index(), self.compute_stream()
        torch.accelerator.set_stream(stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)
            if device != self.device.index:
                torch.accelerator.set_device_index(device)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy on the current stream."""
        target.copy_(source, non_blocking=True)

    @override
    def note_use(self, storage: torch.UntypedStorage) -> None:
        storage_bytes(storage).record_stream(self.compute_stream())

    @override
    def come_after(self, stream: Any) -> None:
        compute = self.compute_stream()
        if stream != compute and not is_capturing():  # a graph must not wait for what is outside of it
            event = self.new_event()
            event.record(stream)
            compute.wait_event(event)

    # ---- order

    def _gate(self, block: Block, stream: Any) -> None:
        """Let a stream write to a block's memory only after that memory's earlier users."""
        for copy in block.after:
            if isinstance(copy, StreamCopy):
                copy.gate(stream)
            elif isinstance(copy, HostCopy):
                copy.settle()
        block.after = ()

    def let_compute_wait(self, event: Any, owner: Any) -> None:
        """Let compute go on only after an event.

        Args:
            event: What to wait for.
            owner: The stream that was computing when the copy was asked for: the memory may be that one's, so it
                waits too, should another one compute now.
        """
        compute = self.compute_stream()
        if owner != compute:
            owner.wait_event(event)
        before = self._timestamp(compute)
        compute.wait_event(event)
        if before is not None:
            self._stalls.append((before, self._timestamp(compute)))

    @override
    def settle(self) -> None:
        with self._lock:
            under_way = [*self._out.under_way, *self._in.under_way]
        for copy in under_way:
            if copy.storage is not None:
                copy.synchronize()

    @override
    def drain(self) -> None:
        with self._lock:
            under_way = [*self._out.under_way, *self._in.under_way]
            self._out.under_way.clear()
            self._in.under_way.clear()
        for copy in under_way:
            copy.synchronize()

    @override
    def close(self) -> None:
        self.drain()

    @override
    def tidy(self) -> None:
        with self._lock:
            self._out.forget_done()
            self._in.forget_done()

    @override
    def measure(self, is_on: bool) -> None:
        self.is_measuring = is_on

    @override
    def take_times(self) -> LaneTimes:
        self.drain()
        with self._lock:
            timed_out, timed_in = self._out.take(), self._in.take()
        copied = *_added(timed_out), *_added(timed_in)
        stalls, self._stalls = self._stalls, []
        for _, after in stalls:  # perhaps on several streams
            after.synchronize()
        stalled = sum(max(0.0, before.elapsed_time(after) / 1000 - _EVENT_SECONDS) for before, after in stalls)
        return LaneTimes(*copied, stalled)

    @contextlib.contextmanager
    def _on(self, stream: Any, mark: Any, num_bytes: int, direction: _Direction) -> Iterator[None]:
        """Make a side stream current for a copy after its mark, timed where that is asked for."""
        stream.wait_event(mark.event)
        before = self._timestamp(stream)
        with self.on_stream(stream):
            yield
        if before is not None:
            direction.timed.append((before, self._timestamp(stream), num_bytes))

    def _timestamp(self, stream: Any) -> Any:
        if not self.is_measuring:
            return None
        event = self.new_event(timing=True)
        event.record(stream)
        return event

    def _issued(self, stream: Any, mark: _Mark, storage: torch.UntypedStorage, direction: _Direction) -> StreamCopy:
        event = self.new_event()
        event.record(stream)
        copy = StreamCopy(self, event, mark.stream, storage)
        self._out.forget_done()
        self._in.forget_done()
        direction.under_way.append(copy)
        return copy


@dataclasses.dataclass(frozen=True, slots=True)
class _Mark:
    """What a compute stream had been asked for by then."""

    event: Any
    stream: Any


class _Direction:
    """Copies of one direction: those under way, in order, and the times of those that were measured."""

    def __init__(self) -> None:
        self.under_way: deque[StreamCopy] = deque()
        self.timed: list[tuple[Any, Any, int]] = []

    def forget_done(self) -> None:
        while self.under_way and self.under_way[0].is_done:
            self.under_way.popleft().storage = None

    def take(self) -> list[tuple[Any, Any, int]]:
        """What was timed since this was last asked: both events of each copy, and its bytes."""
        timed, self.timed = self.timed, []
        return [(before, after, num_bytes) for before, after, num_bytes in timed if after is not None]


def _added(timed: list[tuple[Any, Any, int]]) -> tuple[int, float]:
    """Bytes and seconds of copies of one direction; waits for the last event, which comes after all copies' own."""
    if timed:
        timed[-1][1].synchronize()
    milliseconds = sum(before.elapsed_time(after) for before, after, _ in timed)
    return sum(num_bytes for _, _, num_bytes in timed), milliseconds / 1000


def _part(storage: torch.UntypedStorage, offset: int, num_bytes: int) -> torch.Tensor:
    flat = storage_bytes(storage)
    return flat if num_bytes == storage.nbytes() else flat[offset : offset + num_bytes]
