"""Lanes copy bytes in order, report failures to who waits, and end their threads."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch

from lightning_offload.errors import SpillError
from lightning_offload.runtime.cpu_lanes import SMALL_BYTES, CpuLanes
from lightning_offload.runtime.host_pool import HostBlock, HostPool
from lightning_offload.runtime.lanes import CopyLanes, FakeLanes, HostCopy, memory_bytes, storage_bytes
from lightning_offload.runtime.tiers import lanes_for
from tests.runtime.inline import inline_lanes

KINDS: dict[str, Callable[[], CopyLanes]] = {"cpu": CpuLanes, "inline": inline_lanes}


@pytest.fixture(params=KINDS)
def lanes(request: pytest.FixtureRequest) -> Iterator[CopyLanes]:
    """Lanes of each kind that copies."""
    made = KINDS[request.param]()
    yield made
    made.close()


def storage_of(seed: int, num_bytes: int) -> torch.UntypedStorage:
    """Device memory with random bytes."""
    torch.manual_seed(seed)
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8).untyped_storage()


def block_of(pool: HostPool, num_bytes: int) -> HostBlock:
    """Host memory."""
    block = pool.allocate(num_bytes)
    assert block is not None
    return block


def bytes_in(block: HostBlock) -> torch.Tensor:
    """What a block holds."""
    return memory_bytes(block.address, block.num_bytes)


@pytest.mark.parametrize("num_bytes", [1, 63, 4096, 1 << 20])
def test_bytes_go_out_and_come_back(lanes: CopyLanes, num_bytes: int) -> None:
    """A swap-out holds the storage's bytes, a swap-in gives them to another storage."""
    storage, block = storage_of(1, num_bytes), block_of(HostPool(), num_bytes)
    lanes.swap_out(storage, block).wait()
    assert torch.equal(bytes_in(block), storage_bytes(storage))
    back = torch.zeros(num_bytes, dtype=torch.uint8).untyped_storage()
    copy = lanes.swap_in(block, back)
    copy.wait()
    assert copy.is_done
    assert torch.equal(storage_bytes(back), storage_bytes(storage))


def test_copies_of_one_direction_run_in_order(lanes: CopyLanes) -> None:
    """When the last of many copies to one block is done, so are all before it, and its bytes are there."""
    pool = HostPool()
    block = block_of(pool, 1 << 16)
    storages = [storage_of(seed, 1 << 16) for seed in range(20)]
    copies = [lanes.swap_out(storage, block) for storage in storages]
    copies[-1].wait()
    assert all(copy.is_done for copy in copies)
    assert torch.equal(bytes_in(block), storage_bytes(storages[-1]))


@pytest.mark.parametrize("size", [13, SMALL_BYTES + 13])
def test_failed_copy_raises_in_who_waits(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error in a copy reaches each ``wait``, whoever makes it, and the lane goes on with the next copy."""
    lanes = CpuLanes()
    original = HostBlock.put

    def failing(self: HostBlock, begin: int, address: int, num_bytes: int) -> None:
        if num_bytes == size:
            raise MemoryError("no such page")
        original(self, begin, address, num_bytes)

    monkeypatch.setattr(HostBlock, "put", failing)
    pool = HostPool()
    try:
        bad = lanes.swap_out(storage_of(1, size), block_of(pool, size))
        good = lanes.swap_out(storage_of(2, size + 1), block_of(pool, size + 1))
        for _ in range(2):
            with pytest.raises(SpillError, match="no such page") as caught:
                bad.wait()
        assert isinstance(caught.value.__cause__, MemoryError)
        good.wait()
    finally:
        lanes.close()


def test_threads_start_with_the_first_copy_and_end_with_close() -> None:
    """Lanes that were never used have no threads; closed lanes have none either, and copy inline."""

    def ours() -> set[str]:
        return {thread.name for thread in threading.enumerate() if thread.name.startswith("lightning-offload")}

    lanes, pool = CpuLanes(), HostPool()
    assert ours() == set()
    storage, block = storage_of(1, SMALL_BYTES + 1), block_of(pool, SMALL_BYTES + 1)
    copy = lanes.swap_out(storage, block)
    assert ours() == {"lightning-offload-swap-out"}
    lanes.close()
    assert copy.is_done
    assert ours() == set()
    back = torch.zeros(SMALL_BYTES + 1, dtype=torch.uint8).untyped_storage()
    inline = lanes.swap_in(block, back)
    assert inline.is_done
    assert torch.equal(storage_bytes(back), storage_bytes(storage))
    assert ours() == set()
    lanes.close()


def test_small_copies_are_made_by_who_asks_for_them() -> None:
    """They are done at once, beside large ones that are under way, start no thread, and count with the others."""
    lanes, pool = CpuLanes(), HostPool()
    try:
        small = [(storage_of(seed, SMALL_BYTES - seed), block_of(pool, SMALL_BYTES - seed)) for seed in range(5)]
        assert all(lanes.swap_out(storage, block).is_done for storage, block in small)
        assert not any(thread.name.startswith("lightning-offload") for thread in threading.enumerate())
        large, room = storage_of(9, 8 << 20), block_of(pool, 8 << 20)
        under_way = lanes.swap_out(large, room)
        backs = [torch.zeros(storage.nbytes(), dtype=torch.uint8) for storage, _ in small]
        for (_, block), back in zip(small, backs, strict=True):
            assert lanes.swap_in(block, back.untyped_storage()).is_done
        assert all(torch.equal(back, storage_bytes(storage)) for (storage, _), back in zip(small, backs, strict=True))
        under_way.wait()
        assert torch.equal(bytes_in(room), storage_bytes(large))
        num_bytes = sum(storage.nbytes() for storage, _ in small)
        times = lanes.take_times()
        assert (times.out_bytes, times.in_bytes) == (num_bytes + (8 << 20), num_bytes)
        assert times.in_seconds > 0.0
        assert lanes.take_times().out_bytes == 0
    finally:
        lanes.close()


def test_copies_under_way_are_finished_by_close() -> None:
    """Closing waits for what was asked for."""
    lanes, pool = CpuLanes(), HostPool()
    copies = [lanes.swap_out(storage_of(seed, 1 << 18), block_of(pool, 1 << 18)) for seed in range(10)]
    lanes.close()
    assert all(copy.is_done for copy in copies)


def test_worker_lets_go_of_the_storage_before_it_reports() -> None:
    """Who waits for a copy is the last to hold the storage: dropping it frees it at once."""
    lanes, pool = CpuLanes(), HostPool()
    try:
        for seed in range(50):
            num_bytes = SMALL_BYTES + seed % 2
            storage = storage_of(seed, num_bytes)
            alive = weakref.ref(storage)
            lanes.swap_out(storage, block_of(pool, num_bytes)).wait()
            del storage
            assert alive() is None
    finally:
        lanes.close()


def test_fake_lanes_move_nothing() -> None:
    """Their copies are done at once, and leave both sides as they are."""
    storage, block = storage_of(1, 64), block_of(HostPool(), 64)
    before = bytes_in(block).clone()
    copy = FakeLanes().swap_out(storage, block)
    assert copy.is_done
    copy.wait()
    assert torch.equal(bytes_in(block), before)


def test_copy_is_done_once_finished() -> None:
    """A copy is pending until it is finished."""
    copy = HostCopy()
    assert not copy.is_done
    copy.finish()
    assert copy.is_done
    copy.wait()


def test_lanes_of_a_cpu() -> None:
    """A CPU gets worker threads."""
    made = lanes_for(torch.device("cpu"))
    assert isinstance(made, CpuLanes)
    made.close()
