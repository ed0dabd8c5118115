"""The lower tiers of one device, host memory and disk, with the lanes that lead there.

The executor asks for a block in a tier and for copies to and from it, and knows nothing else of them. Where a
tier has no room the next lower one is tried, unless the plan names a tier; where none has any, the tensor stays
on the device.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch

from lightning_offload.accelerators import kind_of
from lightning_offload.graph.memory_plan import Tier
from lightning_offload.runtime.cpu_lanes import CpuLanes
from lightning_offload.runtime.host_pool import HostBlock, HostPool, Slab
from lightning_offload.runtime.lanes import Block, Copy, CopyLanes, CpuMover, LaneTimes, Mover, memory_bytes
from lightning_offload.runtime.native_lanes import NativeLanes
from lightning_offload.runtime.pinning import pinning_for
from lightning_offload.runtime.spill import DiskBlock, DiskPool
from lightning_offload.runtime.staged_lanes import StagedLanes
from lightning_offload.runtime.stream_lanes import StreamLanes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a plan puts a storage: a tier, and an offset in it if that was planned."""

    tier: Tier
    offset: int | None = None


class Tiers:
    """Where swapped tensors go: host memory first, the spill file after it, and the lanes that lead there.

    Args:
        lanes: Copies to and from host memory.
        host: Host memory.
        disk_lanes: Copies to and from disk.
        disk: The spill file; None without a disk tier.
        pageable: Makes the lanes to host memory that is not page-locked, when there first is any; None where all host
            memory is the same.
    """

    def __init__(
        self,
        lanes: CopyLanes,
        host: HostPool | None = None,
        disk_lanes: CopyLanes | None = None,
        disk: DiskPool | None = None,
        pageable: Callable[[], CopyLanes] | None = None,
    ) -> None:
        self.lanes = lanes
        self.host = host if host is not None else HostPool()
        self.disk_lanes = disk_lanes
        self.disk = disk
        self._make_pageable = pageable
        self._pageable: CopyLanes | None = None
        self._is_measuring = False

    def allocate(self, num_bytes: int, place: Place | None = None, *, is_spare: bool = False) -> Block | None:
        """A block; None where there is no room.

        Args:
            num_bytes: Its size.
            place: Where the plan puts it; None for whatever has room, host memory first.
            is_spare: Whether it must leave the room alone that the plan needs.
        """
        if place is None or place.tier == "host":
            block = self.host.allocate(num_bytes, place.offset if place is not None else None, is_spare=is_spare)
            if block is not None:
                return block
        if self.disk is None or not self._can_reach(self.disk):
            return None
        offset = place.offset if place is not None and place.tier == "disk" else None
        return self.disk.allocate(num_bytes, offset, is_spare=is_spare)

    def in_core(self, core: Any) -> Any:
        """Have the native core copy to and from host memory, from now on.

        Args:
            core: The core.

        Returns:
            Its own lanes; None where it can have none.
        """
        lanes = self.lanes.in_core(core)
        if not isinstance(lanes, NativeLanes):
            return None
        if lanes is not self.lanes:
            lanes.measure(self._is_measuring)
            self.lanes = lanes
        return lanes.core

    def address_of(self, block: Block) -> int:
        """Where a block lies in host memory that :attr:`lanes` lead to; 0 elsewhere."""
        return block.address if isinstance(block, HostBlock) and self._lanes_of(block) is self.lanes else 0

    def _can_reach(self, disk: DiskPool) -> bool:
        """Whether there is host memory for copies to disk to pass through."""
        assert self.disk_lanes is not None
        try:
            self.disk_lanes.prepare()
        except (OSError, MemoryError) as error:
            disk.fail(error)
            return False
        return True

    def swap_out(self, storage: torch.UntypedStorage, block: Block) -> Copy:
        """Start copying a device storage to a block."""
        return self._lanes_of(block).swap_out(storage, block)

    def swap_in(self, block: Block, storage: torch.UntypedStorage) -> Copy:
        """Start copying a block to a device storage."""
        return self._lanes_of(block).swap_in(block, storage)

    def bytes_of(self, block: Block) -> torch.Tensor:
        """What a block holds as flat CPU bytes, once its copy out is done; a view of host memory, and no tensor's own.

        Raises:
            SpillError: It could not be read.
        """
        if block.busy is not None:
            block.busy.synchronize()
        if isinstance(block, HostBlock):
            return memory_bytes(block.address, block.num_bytes)
        memory = Slab(max(block.num_bytes, 1))
        block.get(0, memory.address, block.num_bytes)
        return memory.first_bytes(block.num_bytes)

    def prepare(self, host_bytes: int, disk_bytes: int) -> bool:
        """Have room for what plans put where, before a step begins; False where the host has less than that.

        Raises:
            SpillError: The disk has no room.
        """
        has_room = self.host.prepare(host_bytes)
        if self.disk is not None and disk_bytes:
            self.disk.prepare(disk_bytes)
        return has_room

    def measure(self, is_on: bool) -> None:
        """Whether copies from now on should be timed."""
        self._is_measuring = is_on
        for lanes in self._all_lanes():
            lanes.measure(is_on)

    def take_times(self) -> dict[Tier, LaneTimes]:
        """What the lanes to each tier did since this was last asked."""
        times: dict[Tier, LaneTimes] = {"host": self.lanes.take_times()}
        if self._pageable is not None:
            times["host"] = times["host"].added(self._pageable.take_times())
        if self.disk_lanes is not None:
            times["disk"] = self.disk_lanes.take_times()
        return times

    def tidy(self) -> None:
        """Let go of the memory of copies that are done by now."""
        for lanes in self._all_lanes():
            lanes.tidy()

    def settle(self) -> None:
        """Wait for the copies that hold device memory though nobody will wait for them any more."""
        for lanes in self._all_lanes():
            lanes.settle()

    def drain(self) -> None:
        """Wait until no copy is under way and no lane holds memory."""
        for lanes in self._all_lanes():
            lanes.drain()

    def close(self) -> None:
        """End every thread, give back what is not in use; what still is stays readable."""
        for lanes in self._all_lanes():
            lanes.close()
        self.host.trim()
        if self.disk is not None:
            self.disk.trim()

    def _all_lanes(self) -> list[CopyLanes]:
        return [lanes for lanes in (self.lanes, self._pageable, self.disk_lanes) if lanes is not None]

    def _lanes_of(self, block: Block) -> CopyLanes:
        if isinstance(block, DiskBlock):
            assert self.disk_lanes is not None
            return self.disk_lanes
        assert isinstance(block, HostBlock)
        if self._make_pageable is None or block.is_pinned:
            return self.lanes
        if self._pageable is None:
            self._pageable = self._make_pageable()
            self._pageable.measure(self._is_measuring)
        return self._pageable


def lanes_for(device: torch.device) -> CopyLanes:
    """The lanes between a device and host memory, page-locked where the device needs that."""
    return StreamLanes(device) if kind_of(device).has_streams else CpuLanes()


def mover_for(device: torch.device) -> Mover:
    """A mover of its own for a device's staged lanes."""
    return StreamLanes(device) if kind_of(device).has_streams else CpuMover()


def pageable_for(device: torch.device, staging: Callable[[int], Slab]) -> Callable[[], CopyLanes] | None:
    """What makes the lanes between a device and memory that is not page-locked; None where they are those of all.

    Args:
        device: The device.
        staging: Gives page-locked chunks.
    """
    if not kind_of(device).has_streams:
        return None
    return lambda: StagedLanes(mover_for(device), staging, "pageable")


def tiers_for(device: torch.device, *, host_budget_bytes: int | None = None, disk: DiskPool | None = None) -> Tiers:
    """The tiers of a device.

    Args:
        device: The device.
        host_budget_bytes: Most host memory; 0 for none, None for no limit.
        disk: The spill file; None without a disk tier.
    """
    pinning = pinning_for(device)
    chunk = functools.partial(Slab, pinning=pinning, despite_refusal=True)
    disk_lanes = StagedLanes(mover_for(device), chunk) if disk is not None else None
    host = HostPool(host_budget_bytes, pinning)
    return Tiers(lanes_for(device), host, disk_lanes, disk, pageable_for(device, chunk))
