"""Host blocks never overlap while they live, and come back to the pool whoever drops them."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import threading

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from lightning_offload.errors import SpillError
from lightning_offload.runtime.host_pool import HostBlock, HostPool

MIB = 1 << 20


class PoolMachine(RuleBasedStateMachine):
    """Allocates and drops in any order, filling each block with its own byte."""

    blocks = Bundle("blocks")

    def __init__(self) -> None:
        super().__init__()
        self.pool = HostPool(budget_bytes=16 * MIB)
        self.live: dict[int, tuple[HostBlock, int]] = {}
        self.number = 0

    @rule(target=blocks, num_bytes=st.one_of(st.integers(0, 300), st.integers(1 * MIB, 6 * MIB)))
    def allocate(self, num_bytes: int) -> int:
        block = self.pool.allocate(num_bytes)
        if block is None:
            rounded = -(-max(num_bytes, 1) // 64) * 64
            assert self.pool.slab_bytes + rounded > 16 * MIB
            return -1
        assert block.num_bytes == num_bytes
        assert block.address % 64 == 0
        self.number += 1
        mark = self.number % 251
        ctypes.memset(block.address, mark, num_bytes)
        self.live[self.number] = (block, mark)
        return self.number

    @rule(number=consumes(blocks))
    def drop(self, number: int) -> None:
        if number in self.live:
            block, mark = self.live.pop(number)
            edges = {0, block.num_bytes // 2, block.num_bytes - 1} if block.num_bytes else set()
            assert {ctypes.string_at(block.address + i, 1)[0] for i in edges} <= {mark}

    @rule()
    def trim(self) -> None:
        self.pool.trim()

    @invariant()
    def no_two_live_blocks_overlap(self) -> None:
        ranges = sorted((b.address, b.address + b.num_bytes) for b, _ in self.live.values())
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ranges))

    @invariant()
    def the_budget_holds(self) -> None:
        self.pool.collect()
        assert sum(block.num_bytes for block, _ in self.live.values()) <= self.pool.used_bytes <= 16 * MIB
        assert self.pool.used_bytes <= self.pool.peak_bytes <= 16 * MIB
        assert self.pool.used_bytes <= self.pool.slab_bytes

    def teardown(self) -> None:
        self.live.clear()
        self.pool.trim()
        assert (self.pool.used_bytes, self.pool.slab_bytes) == (0, 0)


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestPool = PoolMachine.TestCase


def test_neighbours_merge() -> None:
    """Blocks dropped in any order leave one free range, on which one block of all their bytes fits."""
    pool = HostPool()
    blocks = [pool.allocate(MIB) for _ in range(4)]
    for index in (1, 3, 0, 2):
        blocks[index] = None
    whole = pool.allocate(4 * MIB)
    assert whole is not None
    assert pool.slab_bytes == 4 * MIB
    assert pool.used_bytes == pool.peak_bytes == 4 * MIB


def test_smallest_hole_that_fits_is_taken() -> None:
    """A large hole is not cut for a block that a small one holds."""
    pool = HostPool()
    sizes = (1024, 64, 256, 64)
    large, wall, small, end = (pool.allocate(size) for size in sizes)
    assert small is not None
    address = small.address
    del large, small
    again = pool.allocate(256)
    assert again is not None
    assert again.address == address
    assert wall is not None
    assert end is not None


def test_budget_refuses_and_recovers() -> None:
    """What does not fit is refused without a trace; it fits once something was dropped."""
    pool = HostPool(budget_bytes=1024)
    first = pool.allocate(1000)
    assert first is not None
    assert pool.allocate(64) is None
    assert pool.used_bytes == 1024
    del first
    assert pool.allocate(64) is not None
    assert pool.peak_bytes == 1024


def test_memory_that_the_host_does_not_have_is_refused() -> None:
    """A block larger than the host can map is refused like one beyond the budget, or raises one of our errors."""
    pool = HostPool()
    with contextlib.suppress(SpillError):
        assert pool.allocate(1 << 60) is None
    assert pool.used_bytes == 0


def test_trim_keeps_slabs_in_use() -> None:
    """Slabs that no block lies on are unmapped, others stay with their contents."""
    pool = HostPool()
    small, large = pool.allocate(64), pool.allocate(8 * MIB)
    assert small is not None
    ctypes.memset(small.address, 7, 64)
    del large
    pool.trim()
    assert pool.slab_bytes == 4 * MIB
    assert ctypes.string_at(small.address, 64) == bytes([7] * 64)
    del small
    pool.trim()
    assert pool.slab_bytes == 0


def test_blocks_outlive_their_pool() -> None:
    """A block that is still held keeps its memory after the pool has gone."""
    pool = HostPool()
    block = pool.allocate(128)
    assert block is not None
    ctypes.memset(block.address, 9, 128)
    del pool
    gc.collect()
    assert ctypes.string_at(block.address, 128) == bytes([9] * 128)


@pytest.mark.parametrize("num_threads", [4])
def test_blocks_may_be_dropped_by_any_thread(num_threads: int) -> None:
    """Finalizers take no lock: blocks dropped elsewhere while the owner allocates all come back, once."""
    pool = HostPool()
    batches = [[pool.allocate(4096) for _ in range(200)] for _ in range(num_threads)]
    start = threading.Barrier(num_threads + 1)

    def drop(batch: list[HostBlock | None]) -> None:
        start.wait()
        while batch:
            batch.pop()

    threads = [threading.Thread(target=drop, args=(batch,)) for batch in batches]
    for thread in threads:
        thread.start()
    start.wait()
    kept = [pool.allocate(4096) for _ in range(300)]
    for thread in threads:
        thread.join()
    pool.collect()
    assert pool.used_bytes == 300 * 4096
    addresses = sorted(block.address for block in kept if block is not None)
    assert len(addresses) == 300
    assert all(b - a >= 4096 for a, b in itertools.pairwise(addresses))


def test_planned_blocks_lie_where_the_plan_puts_them() -> None:
    """The planned slab has the plan's size to the page; offsets are taken where they are free, and are only hints."""
    pool = HostPool()
    assert pool.prepare(3 * MIB)
    assert pool.slab_bytes == 3 * MIB
    first, second, third = (pool.allocate(MIB, at=i * MIB) for i in range(3))
    assert first is not None
    assert second is not None
    assert third is not None
    assert second.address - first.address == third.address - second.address == MIB
    elsewhere = pool.allocate(MIB, at=MIB)
    assert elsewhere is not None
    assert elsewhere.address not in {first.address, second.address, third.address}
    assert pool.slab_bytes > 3 * MIB
    place = second.address
    del second, elsewhere
    again = pool.allocate(MIB, at=MIB)
    assert again is not None
    assert again.address == place


def test_steps_under_a_plan_use_the_same_memory_again() -> None:
    """Many steps of one plan never map anything new, and nothing is wasted beyond a page."""
    pool = HostPool()
    recorded = [pool.allocate(5 * MIB) for _ in range(3)]  # the recorded step, before there is a plan
    del recorded
    assert pool.prepare(8 * MIB)
    for _ in range(20):
        assert pool.prepare(8 * MIB)
        blocks = [pool.allocate(MIB, at=i * MIB) for i in range(8)]
        assert pool.slab_bytes == pool.peak_bytes == 8 * MIB
        del blocks


def test_planned_slab_follows_the_plan() -> None:
    """A plan that needs more, or much less, gets a slab of its size once nothing lies on the old one."""
    pool = HostPool()
    assert pool.prepare(4 * MIB)
    block = pool.allocate(MIB, at=0)
    assert pool.prepare(8 * MIB)
    assert pool.slab_bytes == 4 * MIB  # still in use
    del block
    assert pool.prepare(8 * MIB)
    assert pool.slab_bytes == 8 * MIB
    assert pool.prepare(8 * MIB - 4096)  # not worth a new mapping
    assert pool.slab_bytes == 8 * MIB
    assert pool.prepare(2 * MIB)
    assert pool.slab_bytes == 2 * MIB
    assert pool.prepare(0)
    assert pool.slab_bytes == 0


def test_a_plan_beyond_the_budget_is_refused() -> None:
    """Preparing tells that the host has less than planned."""
    pool = HostPool(budget_bytes=4 * MIB)
    assert not pool.prepare(5 * MIB)
    assert pool.prepare(4 * MIB)
    assert HostPool(budget_bytes=0).allocate(1) is None


def test_slabs_of_another_recorded_step_are_given_back() -> None:
    """What a second shape needed while it was recorded goes once its plan fits in the planned slab."""
    pool = HostPool()
    assert pool.prepare(8 * MIB)
    recorded = [pool.allocate(6 * MIB) for _ in range(3)]
    assert pool.slab_bytes > 8 * MIB
    del recorded
    assert pool.prepare(8 * MIB)
    assert pool.slab_bytes == 8 * MIB


def test_spare_blocks_leave_the_plan_its_room() -> None:
    """They lie beside the planned slab and within what the budget leaves beside it, and never take it away."""
    pool = HostPool(budget_bytes=3 * MIB)
    assert pool.prepare(2 * MIB)
    spare = pool.allocate(MIB, is_spare=True)
    assert spare is not None
    assert pool.allocate(MIB, is_spare=True) is None
    planned = [pool.allocate(MIB, at=i * MIB) for i in range(2)]
    assert [block.address - pool._planned.address for block in planned if block and pool._planned] == [0, MIB]
    assert pool.used_bytes == 3 * MIB
