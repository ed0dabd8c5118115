"""Makes streams slow and released memory poisonous: what the tests of races do to the runtime.

The one place that knows names inside `lightning_offload.runtime`. A sleeping kernel in front of copies on a side
stream, or on the compute stream around its meetings with them, moves everything as far out of step as the runtime
allows; it never makes a right program wrong. On a CPU the lanes' threads sleep instead.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from typing import Any, Literal
from unittest import mock

import torch
from torch.utils._python_dispatch import _disable_current_modes

from lightning_offload import MemoryPlugin
from lightning_offload.runtime.host_pool import HostBlock, HostPool
from lightning_offload.runtime.materialize import Materializer
from lightning_offload.runtime.native_executor import NativeExecutor
from lightning_offload.runtime.native_lanes import NativeLanes
from lightning_offload.runtime.stream_lanes import StreamLanes
from tests.gpu.device import DEVICE, IS_CUDA

Lane = Literal["out", "in", "compute"]

_CYCLES = 2_000_000  # a millisecond at 2 GHz
_CPU_SECONDS = 0.0003
_POISON = 0xFF  # NaN in every floating-point type, -1 in every integer type


def pool_of(memory: MemoryPlugin) -> HostPool:
    """The host memory of an attached plugin."""
    assert memory._steps.hardware is not None
    return memory._steps.hardware.tiers.host


@contextlib.contextmanager
def slowed(lanes: Collection[Lane], *, seed: int, share: float = 0.5) -> Iterator[Counter[str]]:
    """Let lanes fall behind at random; yields how often each did.

    Args:
        lanes: Which.
        seed: Of the dice.
        share: Of the copies and waits before which a lane sleeps.
    """
    dice = random.Random(seed)
    counts: Counter[str] = Counter()

    def sleeps(lane: Lane) -> bool:
        if lane not in lanes or dice.random() >= share:
            return False
        counts[lane] += 1
        return True

    with contextlib.ExitStack() as stack:
        for patch in _stream_patches(sleeps) if IS_CUDA else _thread_patches(sleeps):
            stack.enter_context(patch)
        yield counts


def _stream_patches(sleeps: Callable[[Lane], bool]) -> list[Any]:
    to_host, to_device = StreamLanes.to_host, StreamLanes.to_device
    mark, let_compute_wait = StreamLanes.mark, StreamLanes.let_compute_wait

    def slow_to_host(self: StreamLanes, *args: Any) -> Any:
        if sleeps("out"):
            _sleep_on(self.out_stream)
        return to_host(self, *args)

    def slow_to_device(self: StreamLanes, *args: Any) -> Any:
        if sleeps("in"):
            _sleep_on(self.in_stream)
        return to_device(self, *args)

    def slow_mark(self: StreamLanes) -> Any:
        if sleeps("compute"):
            torch.cuda._sleep(_CYCLES)
        return mark(self)

    def slow_wait(self: StreamLanes, *args: Any) -> None:
        let_compute_wait(self, *args)
        if sleeps("compute"):
            torch.cuda._sleep(_CYCLES)

    # The core copies, marks and waits out of sight: its lanes fall behind before the packs and unpacks that ask it to.
    pack, unpack = NativeExecutor.pack, NativeExecutor.unpack

    def fall_behind(executor: NativeExecutor, lane: Literal["out", "in"]) -> None:
        if isinstance(executor._tiers.lanes, NativeLanes):
            others = executor._tiers.lanes._others
            assert isinstance(others, StreamLanes)
            if sleeps(lane):
                _sleep_on(others.out_stream if lane == "out" else others.in_stream)
            if sleeps("compute"):
                torch.cuda._sleep(_CYCLES)

    def slow_pack(self: NativeExecutor, tensor: torch.Tensor) -> Any:
        fall_behind(self, "out")
        return pack(self, tensor)

    def slow_unpack(self: NativeExecutor, packed: Any) -> torch.Tensor:
        fall_behind(self, "in")
        return unpack(self, packed)

    return [
        mock.patch.object(NativeExecutor, "pack", slow_pack),
        mock.patch.object(NativeExecutor, "unpack", slow_unpack),
        mock.patch.object(StreamLanes, "to_host", slow_to_host),
        mock.patch.object(StreamLanes, "to_device", slow_to_device),
        mock.patch.object(StreamLanes, "mark", slow_mark),
        mock.patch.object(StreamLanes, "let_compute_wait", slow_wait),
    ]


def _sleep_on(stream: Any) -> None:
    with stream:
        torch.cuda._sleep(_CYCLES)


def _thread_patches(sleeps: Callable[[Lane], bool]) -> list[Any]:
    def slow(name: str, lane: Lane) -> Any:
        move = getattr(HostBlock, name)

        def slow_move(*args: Any) -> Any:
            if sleeps(lane):
                time.sleep(_CPU_SECONDS)
            return move(*args)

        return mock.patch.object(HostBlock, name, slow_move)

    return [slow("put", "out"), slow("get", "in")]


@contextlib.contextmanager
def without_waiting() -> Iterator[None]:
    """Break the runtime: compute goes on without its copies. What the tests of races must notice."""
    with (
        mock.patch.object(StreamLanes, "let_compute_wait"),
        mock.patch.object(StreamLanes, "in_core", return_value=None),
    ):
        yield


@contextlib.contextmanager
def poisoned() -> Iterator[Counter[str]]:
    """Overwrite memory as soon as the runtime lets go of it; yields how often that was."""
    counts: Counter[str] = Counter()
    release, dismiss, end = Materializer.release, Materializer.dismiss_visitors, HostBlock.__del__
    pack = NativeExecutor.pack

    def release_and_poison(self: Materializer, value: Any) -> None:
        was_held = value.storage is not None
        release(self, value)
        if was_held and value.storage is None:
            counts["device"] += 1
            _fill_new_memory(value.num_bytes)

    def pack_and_poison(self: NativeExecutor, tensor: torch.Tensor) -> Any:
        handle: Any = pack(self, tensor)
        value = handle.value
        if value is not None and value.block is not None and value.storage is None:  # the core has released it
            counts["device"] += 1
            _fill_new_memory(value.num_bytes)
        return handle

    def dismiss_and_poison(self: Materializer) -> None:
        sizes = [value.num_bytes for value in self._visitors]
        dismiss(self)
        for num_bytes in sizes:
            counts["device"] += 1
            _fill_new_memory(num_bytes)

    def poison_and_end(self: HostBlock) -> None:
        # A copy under way still uses the block's memory, rightly; its next owner waits for that copy.
        if self.busy is None or self.busy.is_done:
            counts["host"] += 1
            ctypes.memset(self.address, _POISON, self.num_bytes)
        end(self)

    with (
        mock.patch.object(Materializer, "release", release_and_poison),
        mock.patch.object(NativeExecutor, "pack", pack_and_poison),
        mock.patch.object(Materializer, "dismiss_visitors", dismiss_and_poison),
        mock.patch.object(HostBlock, "__del__", poison_and_end),
    ):
        yield counts


def _fill_new_memory(num_bytes: int) -> None:
    """Get memory of a size that was just given back, which is most likely the same, and spoil it."""
    with _disable_current_modes(), torch.no_grad():
        torch.empty(num_bytes, dtype=torch.uint8, device=DEVICE).fill_(_POISON)
