"""Runs steps over lanes of streams without an accelerator, where freed and unfilled memory never holds right bytes.

Each stream is a thread that copies by address, as late as it likes, and keeps no memory alive. Memory that a copy
in will fill holds 0xFF until then (NaN in every float type), and memory that was swapped out is overwritten before
the next op after it was given up. So a missing wait, and a buffer that goes back too early, give wrong bits.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from typing_extensions import override

from lightning_offload.graph import DeviceSpec
from lightning_offload.runtime import tiers
from lightning_offload.runtime.executor import StepExecutor
from lightning_offload.runtime.hooks import bypass_mode
from lightning_offload.runtime.host_pool import Slab
from lightning_offload.runtime.lanes import Block, Copy, CopyLanes, LaneTimes, storage_bytes
from lightning_offload.runtime.materialize import Materializer
from lightning_offload.runtime.staged_lanes import StagedLanes
from lightning_offload.runtime.stream_lanes import StreamLanes
from tests.runtime.fake_streams import FakeStreamLanes

POISON = 0xFF
MAX_DELAY_SECONDS = 0.0005
SPEC = DeviceSpec(
    name="streams", kind="cpu", memory_bytes=None, copy_interference=0.0, overhead_seconds=1e-6,
    d2h_bytes_per_second=1e9, h2d_bytes_per_second=1e9,
    disk_write_bytes_per_second=1e9, disk_read_bytes_per_second=1e9,
)  # fmt: skip
"""Links that no delay slows down, so that plans swap and do not depend on the machine."""

Delays = Callable[[FakeStreamLanes], None]


class Poison:
    """Overwrites what was given up, with its own allocations.

    Attributes:
        num_bytes: How much it overwrote.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self._given_up: deque[int] = deque()

    def watch(self, storage: torch.UntypedStorage) -> None:
        """Overwrite a storage's memory once it is freed."""
        weakref.finalize(storage, self._given_up.append, storage.nbytes())

    def spread(self) -> None:
        """The allocator hands out first what was freed last."""
        held = []
        with bypass_mode, torch._C._DisableTorchDispatch():
            while self._given_up:
                size = self._given_up.popleft()
                held.append(torch.full((size,), POISON, dtype=torch.uint8))
                self.num_bytes += size


class PoisonedLanes(CopyLanes):
    """Lanes over others; see the module's docstring."""

    def __init__(self, over: CopyLanes, poison: Poison) -> None:
        self._over = over
        self._poison = poison

    @override
    def swap_out(self, storage: torch.UntypedStorage, block: Block) -> Copy:
        self._poison.watch(storage)
        return self._over.swap_out(storage, block)

    @override
    def swap_in(self, block: Block, storage: torch.UntypedStorage) -> Copy:
        storage_bytes(storage).fill_(POISON)
        self._poison.watch(storage)
        return self._over.swap_in(block, storage)

    @override
    def compute_stream(self) -> Any:
        return self._over.compute_stream()

    @override
    def tidy(self) -> None:
        self._over.tidy()

    @override
    def measure(self, is_on: bool) -> None:
        self._over.measure(is_on)

    @override
    def take_times(self) -> LaneTimes:
        return self._over.take_times()

    @override
    def drain(self) -> None:
        self._over.drain()

    @override
    def close(self) -> None:
        self._over.close()


@contextlib.contextmanager
def streaming(delays: Delays | None = None, *, seed: int = 0, is_pageable: bool = False) -> Iterator[Poison]:
    """Let plugins on the CPU use lanes of streams, with poison.

    Args:
        delays: Sets the delays of each mover's streams; by default both dawdle at random.
        seed: Of the delays.
        is_pageable: Copy as if host memory could not be page-locked.
    """
    movers: list[FakeStreamLanes] = []
    poison = Poison()

    def mover_for(device: torch.device) -> StreamLanes:
        movers.append(FakeStreamLanes(seed, MAX_DELAY_SECONDS))
        if delays is not None:
            delays(movers[-1])
        return movers[-1]

    def lanes_for(device: torch.device) -> CopyLanes:
        return PoisonedLanes(mover_for(device), poison)

    def staged(*args: Any) -> CopyLanes:
        return PoisonedLanes(StagedLanes(*args), poison)

    def pageable_for(device: torch.device, staging: Callable[[int], Slab]) -> Callable[[], CopyLanes] | None:
        return (lambda: staged(mover_for(device), staging, "pageable")) if is_pageable else None

    dispatch, release = StepExecutor.dispatch, Materializer.release

    def poisoned_dispatch(self: StepExecutor, *args: Any) -> Any:
        if not bypass_mode.depth:
            poison.spread()
        return dispatch(self, *args)

    def poisoned_release(self: Materializer, *args: Any) -> None:
        release(self, *args)
        poison.spread()

    with (
        mock.patch.object(tiers, "lanes_for", lanes_for),
        mock.patch.object(tiers, "mover_for", mover_for),
        mock.patch.object(tiers, "pageable_for", pageable_for),
        mock.patch.object(tiers, "StagedLanes", staged),
        mock.patch("lightning_offload.plugins.hardware.measure_spec", return_value=SPEC),
        mock.patch.object(StepExecutor, "dispatch", poisoned_dispatch),
        mock.patch.object(Materializer, "release", poisoned_release),
    ):
        try:
            yield poison
        finally:
            for mover in movers:
                mover.end()


def only_out(mover: FakeStreamLanes) -> None:
    """Delay copies off the device alone."""
    mover.out_stream.delay = lambda: MAX_DELAY_SECONDS
    mover.in_stream.delay = lambda: 0.0


def only_in(mover: FakeStreamLanes) -> None:
    """Delay copies to the device alone."""
    mover.out_stream.delay = lambda: 0.0
    mover.in_stream.delay = lambda: MAX_DELAY_SECONDS
