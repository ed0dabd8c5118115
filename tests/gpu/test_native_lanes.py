"""The native core's lanes order copies against compute by events alone, on whatever streams and devices compute is."""

from __future__ import annotations

import pytest
import torch

from lightning_offload.runtime import native
from lightning_offload.runtime.host_pool import HostBlock
from lightning_offload.runtime.lanes import memory_bytes, storage_bytes
from lightning_offload.runtime.native_lanes import NativeLanes
from lightning_offload.runtime.tiers import Place, Tiers, tiers_for
from tests.gpu.device import CUDA_MARKS, IS_EMULATED, TOLERANT, take_races

pytestmark = [*CUDA_MARKS, TOLERANT]

NUM_BYTES = 1 << 20


@pytest.fixture(autouse=True)
def any_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The core is there, whatever engine other tests are to run in."""
    monkeypatch.delenv("LIGHTNING_OFFLOAD_ENGINE", raising=False)


def tiers_on(device: torch.device) -> tuple[Tiers, NativeLanes]:
    """Tiers of a device, whose copies the core makes."""
    core = native.load()
    if core is None:
        pytest.skip(f"needs the native core: {native.why_python()}")
    tiers = tiers_for(device)
    assert tiers.in_core(core) is not None
    assert isinstance(tiers.lanes, NativeLanes)
    assert tiers.in_core(core) is tiers.lanes.core
    return tiers, tiers.lanes


def current() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def filled(mark: int, device: torch.device) -> torch.UntypedStorage:
    """Device memory that one byte fills once compute gets there."""
    return torch.full((NUM_BYTES,), mark, dtype=torch.uint8, device=device).untyped_storage()


def block_of(tiers: Tiers, at: int | None = None) -> HostBlock:
    """Host memory of the lanes."""
    block = tiers.allocate(NUM_BYTES, Place(tier="host", offset=at) if at is not None else None)
    assert isinstance(block, HostBlock)
    assert tiers.address_of(block) == block.address
    return block


def marks(storage: torch.UntypedStorage) -> set[int]:
    """The bytes that occur in device memory, as compute sees them."""
    return set(storage_bytes(storage).unique().tolist())


def keep_busy() -> None:
    """Let compute fall behind the host."""
    x = torch.ones(256, 256, device=current())
    for _ in range(20):
        x = torch.mm(x, x).clamp_(0, 1)


def test_bytes_come_back_behind_what_compute_was_asked_for() -> None:
    """A copy out comes after what fills its source, one back after what uses its memory; compute waits for both."""
    tiers, lanes = tiers_on(current())
    keep_busy()
    source, block, back = filled(7, current()), block_of(tiers), filled(0, current())
    lanes.swap_out(source, block).wait()
    storage_bytes(source).fill_(9)
    lanes.swap_in(block, back).wait()
    assert marks(back) == {7}
    assert marks(source) == {9}
    lanes.drain()
    assert set(memory_bytes(block.address, NUM_BYTES).tolist()) == {7}
    assert not take_races()


def test_host_memory_is_used_again_behind_its_copies() -> None:
    """A block that is dropped may be handed out at once: the next copy to it comes after its last one."""
    tiers, lanes = tiers_on(current())
    assert tiers.prepare(NUM_BYTES, 0)
    backs = []
    for mark in range(10):
        keep_busy()
        block, back = block_of(tiers, at=0), filled(255, current())
        lanes.swap_out(filled(mark, current()), block).wait()
        backs.append((back, lanes.swap_in(block, back)))
        del block
    for mark, (back, copy) in enumerate(backs):
        copy.wait()
        assert marks(back) == {mark}
    assert not take_races()


def test_what_comes_back_comes_after_its_copy_out() -> None:
    """Whoever has waited for that, and whoever has not."""
    tiers, lanes = tiers_on(current())
    backs = []
    for mark in range(10):
        block, back = block_of(tiers), filled(255, current())
        lanes.swap_out(filled(mark, current()), block)
        backs.append((back, lanes.swap_in(block, back), block))
    for mark, (back, copy, _) in enumerate(backs):
        copy.wait()
        assert marks(back) == {mark}
    assert not take_races()


def test_memory_is_held_until_compute_waits() -> None:
    """A copy holds device memory until compute is told to wait for it, or it is done and the lanes come by."""
    tiers, lanes = tiers_on(current())
    keep_busy()
    waited = lanes.swap_out(filled(1, current()), block_of(tiers))
    dropped = lanes.swap_out(filled(2, current()), block_of(tiers))
    assert waited.storage is not None or waited.is_done  # type: ignore[attr-defined]
    waited.wait()
    assert waited.storage is None  # type: ignore[attr-defined]
    assert dropped.storage is not None or dropped.is_done  # type: ignore[attr-defined]
    lanes.settle()
    assert dropped.storage is None  # type: ignore[attr-defined]
    assert dropped.is_done
    lanes.swap_out(filled(3, current()), held := block_of(tiers))
    torch.cuda.synchronize()
    lanes.tidy()
    assert held.busy is not None
    assert held.busy.storage is None  # type: ignore[attr-defined]
    assert not take_races()


def test_the_stream_that_memory_is_of_waits_too() -> None:
    """Where another stream computes by the time of the wait, the one that asked for the copy waits as well."""
    tiers, lanes = tiers_on(current())
    block, source = block_of(tiers), filled(5, current())
    keep_busy()
    copy = lanes.swap_out(source, block)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        copy.wait()
        copy.wait()  # who reads it next may ask again
    storage_bytes(source).fill_(0)
    torch.cuda.synchronize()
    assert set(memory_bytes(block.address, NUM_BYTES).tolist()) == {5}
    assert not take_races()


def test_copies_and_stalls_are_timed() -> None:
    """Bytes and seconds of each direction are taken once, for the copies since measuring began."""
    tiers, lanes = tiers_on(current())
    block, storage = block_of(tiers), filled(1, current())
    lanes.swap_out(storage, block).wait()
    lanes.measure(True)
    for _ in range(3):
        lanes.swap_out(storage, block).wait()
    lanes.swap_in(block, storage).wait()
    times = lanes.take_times()
    assert (times.out_bytes, times.in_bytes) == (3 * NUM_BYTES, NUM_BYTES)
    assert min(times.out_seconds, times.in_seconds, times.stall_seconds) >= 0
    if not IS_EMULATED:
        assert min(times.out_seconds, times.in_seconds) > 0
    assert lanes.take_times().out_bytes == 0


def test_another_device_than_the_current_one() -> None:
    """Copies leave the current device and its stream alone."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    before, second = torch.cuda.current_device(), torch.device("cuda", 1)
    torch.cuda.set_device(0)
    tiers, lanes = tiers_on(second)
    stream = torch.cuda.Stream(torch.device("cuda", 0))
    source, back, block = filled(7, second), filled(0, second), block_of(tiers)
    with torch.cuda.stream(stream):
        lanes.swap_out(source, block).wait()
        lanes.swap_in(block, back).wait()
        assert (torch.cuda.current_device(), torch.cuda.current_stream()) == (0, stream)
    assert marks(back) == {7}
    torch.cuda.set_device(before)
    assert not take_races()
