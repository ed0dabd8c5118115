"""Memory that is not page-locked is reached through chunks, in order, whatever the streams are late with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from lightning_offload.runtime.host_pool import HostBlock, HostPool, Slab
from lightning_offload.runtime.lanes import storage_bytes
from lightning_offload.runtime.staged_lanes import StagedLanes
from lightning_offload.runtime.tiers import Tiers
from tests.runtime.fake_streams import FakeStreamLanes

CHUNK_BYTES = 4096
SIZES = (1, 100, CHUNK_BYTES, CHUNK_BYTES + 1, 5 * CHUNK_BYTES + 17)


@pytest.fixture(params=[1, 2, 3])
def mover(request: pytest.FixtureRequest) -> Iterator[FakeStreamLanes]:
    """Streams that are late."""
    made = FakeStreamLanes(seed=request.param, max_delay_seconds=0.01)
    yield made
    made.end()


def lanes_on(mover: FakeStreamLanes) -> StagedLanes:
    """Lanes whose chunks are small."""
    return StagedLanes(mover, Slab, chunk_bytes=CHUNK_BYTES)


def numbers(num_bytes: int, seed: int) -> torch.UntypedStorage:
    """A storage of random bytes."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=generator).untyped_storage()


def block_of(pool: HostPool, num_bytes: int) -> HostBlock:
    """A block."""
    block = pool.allocate(num_bytes)
    assert block is not None
    return block


def test_bytes_come_back(mover: FakeStreamLanes) -> None:
    """Of any size, several under way at once."""
    lanes, pool = lanes_on(mover), HostPool()
    sources = [numbers(size, seed) for seed, size in enumerate(SIZES)]
    blocks = [block_of(pool, size) for size in SIZES]
    for source, block in zip(sources, blocks, strict=True):
        lanes.swap_out(source, block)
    targets = [torch.UntypedStorage(size) for size in SIZES]
    copies = [lanes.swap_in(block, target) for block, target in zip(blocks, targets, strict=True)]
    for copy in copies:
        copy.wait()
    for source, target in zip(sources, targets, strict=True):
        assert torch.equal(storage_bytes(source), storage_bytes(target))
    lanes.close()


def test_memory_is_used_again_behind_its_copies(mover: FakeStreamLanes) -> None:
    """A block that is dropped while it is read is given to the next one, who must not overwrite it too early."""
    lanes, pool = lanes_on(mover), HostPool()
    size = 3 * CHUNK_BYTES
    found = []
    for seed in range(12):
        source, target = numbers(size, seed), torch.UntypedStorage(size)
        block = block_of(pool, size)
        lanes.swap_out(source, block).wait()
        found.append((source, target, lanes.swap_in(block, target)))
        del block
    for source, target, copy in found:
        copy.wait()
        assert torch.equal(storage_bytes(source), storage_bytes(target))
    assert pool.slab_bytes <= 4 << 20
    lanes.close()


def test_a_block_is_read_twice(mover: FakeStreamLanes) -> None:
    """And may be filled again after that."""
    lanes, pool = lanes_on(mover), HostPool()
    size = 2 * CHUNK_BYTES + 5
    first, second = numbers(size, 1), numbers(size, 2)
    targets = [torch.UntypedStorage(size) for _ in range(3)]
    block = block_of(pool, size)
    lanes.swap_out(first, block)
    copies = [lanes.swap_in(block, target) for target in targets[:2]]
    lanes.swap_out(second, block)
    copies.append(lanes.swap_in(block, targets[2]))
    for copy in copies:
        copy.wait()
    for source, target in zip((first, first, second), targets, strict=True):
        assert torch.equal(storage_bytes(source), storage_bytes(target))
    lanes.close()


def test_tiers_take_them_for_such_memory_alone(mover: FakeStreamLanes) -> None:
    """They are made when there first is such memory, and their copies are timed with the others."""
    made: list[StagedLanes] = []

    def make() -> StagedLanes:
        made.append(lanes_on(mover))
        return made[-1]

    tiers = Tiers(mover, pageable=make)
    tiers.measure(True)
    assert not made
    source, target = numbers(100, 1), torch.UntypedStorage(100)
    block = block_of(tiers.host, 100)
    tiers.swap_out(source, block).wait()
    tiers.swap_in(block, target).wait()
    assert len(made) == 1
    assert torch.equal(storage_bytes(source), storage_bytes(target))
    block.owner.is_pinned = True
    tiers.swap_out(source, block).wait()
    block.owner.is_pinned = False
    times = tiers.take_times()["host"]
    assert times.out_bytes >= 200
    assert times.in_bytes >= 100
    tiers.close()
