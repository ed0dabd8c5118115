"""Tiers whose copies have ended when they return, made by the thread that asks."""

from __future__ import annotations

from lightning_offload.runtime.cpu_lanes import CpuLanes
from lightning_offload.runtime.host_pool import HostPool
from lightning_offload.runtime.lanes import CopyLanes
from lightning_offload.runtime.tiers import Tiers


def inline_lanes() -> CopyLanes:
    """Closed lanes: they copy inline and have no threads."""
    lanes = CpuLanes()
    lanes.close()
    return lanes


def inline_tiers(pool: HostPool | None = None) -> Tiers:
    """Host memory alone, behind inline lanes."""
    return Tiers(inline_lanes(), pool)
