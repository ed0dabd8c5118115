"""The native core makes a CPU's small copies; what it does not take stays with the lanes that Python has."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from lightning_offload.runtime.cpu_lanes import SMALL_BYTES, CpuLanes
from lightning_offload.runtime.host_pool import HostBlock, HostPool
from lightning_offload.runtime.lanes import DONE, CopyLanes, FakeLanes, memory_bytes, storage_bytes
from lightning_offload.runtime.native_lanes import NativeLanes
from lightning_offload.runtime.spill import DiskPool
from lightning_offload.runtime.tiers import Tiers, tiers_for


def native(core: ModuleType) -> NativeLanes:
    """The lanes of a CPU in the core."""
    lanes = CpuLanes().in_core(core)
    assert isinstance(lanes, NativeLanes)
    assert lanes.in_core(core) is lanes
    return lanes


def block_of(num_bytes: int) -> HostBlock:
    """Host memory."""
    block = HostPool().allocate(num_bytes)
    assert block is not None
    return block


@pytest.mark.parametrize("num_bytes", [1, 63, SMALL_BYTES, SMALL_BYTES + 1])
def test_bytes_go_out_and_come_back(core: ModuleType, num_bytes: int) -> None:
    """Whoever makes a copy, its bytes are there once it was waited for, and are counted once."""
    lanes = native(core)
    torch.manual_seed(1)
    source = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8)
    block, back = block_of(num_bytes), torch.zeros(num_bytes, dtype=torch.uint8)
    out = lanes.swap_out(source.untyped_storage(), block)
    assert (out is DONE) == (num_bytes <= SMALL_BYTES)
    out.wait()
    assert torch.equal(memory_bytes(block.address, num_bytes), source)
    lanes.swap_in(block, back.untyped_storage()).wait()
    assert torch.equal(back, source)
    times = lanes.take_times()
    assert (times.out_bytes, times.in_bytes) == (num_bytes, num_bytes)
    assert min(times.out_seconds, times.in_seconds) > 0
    assert lanes.take_times().out_bytes == 0
    lanes.close()


def test_what_is_no_block_is_refused(core: ModuleType) -> None:
    """What has no address, is no storage, or is too small a one, ends in an error, and copies nothing."""
    lanes, storage = native(core), torch.zeros(4).untyped_storage()
    with pytest.raises(AttributeError, match="has no attribute"):
        lanes.core.swap_out(storage, object())
    with pytest.raises(TypeError, match="UntypedStorage"):
        lanes.core.swap_in(block_of(16), "storage")
    with pytest.raises(ValueError, match="a storage of 16 bytes has no 17 to copy"):
        lanes.core.swap_in(block_of(17), storage)
    assert lanes.take_times().out_bytes == 0


def test_tiers_tell_the_core_of_its_own_host_memory_alone(core: ModuleType, tmp_path: object) -> None:
    """A block of the disk has no address there; lanes that Python makes up stay as they are."""
    tiers = tiers_for(torch.device("cpu"), disk=(disk := DiskPool(str(tmp_path))))
    assert tiers.in_core(core) is not None
    block = tiers.allocate(100)
    assert isinstance(block, HostBlock)
    assert tiers.address_of(block) == block.address
    spilled = disk.allocate(100)
    assert spilled is not None
    assert tiers.address_of(spilled) == 0
    fake: CopyLanes = FakeLanes()
    others = Tiers(fake)
    assert others.in_core(core) is None
    assert others.lanes is fake
    del spilled
    tiers.close()
    disk.close()


def test_storages_of_other_sizes(core: ModuleType) -> None:
    """As many bytes are copied as the block has."""
    lanes, block = native(core), block_of(10)
    lanes.swap_out(torch.arange(20, dtype=torch.uint8).untyped_storage(), block)
    target = torch.zeros(20, dtype=torch.uint8)
    lanes.swap_in(block, target.untyped_storage())
    assert storage_bytes(target.untyped_storage()).tolist() == [*range(10), *([0] * 10)]
