"""Where swapped storages lie in their tiers, so that no two that are there at the same time overlap.

Known as offline dynamic storage allocation, which is NP-hard in general. Backward reads in the reverse order of
forward, so most stays nest, and for stays that nest, placing each at the lowest offset that is free all along is
optimal. It is done in three orders (by begin, longest first, largest first), and the best is taken; cf. Gergov,
"Algorithms for compile-time memory optimization" (SODA 1999), for what can be guaranteed otherwise.

A runtime may take an offset as a hint: a step can differ from the one that was recorded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import get_args

import numpy as np
import numpy.typing as npt

from lightning_offload.graph.memory_plan import MemoryPlan, Tier
from lightning_offload.graph.stays import ALIGNMENT, Stays, stored_bytes
from lightning_offload.graph.step_graph import StepGraph

__all__ = ["ALIGNMENT", "Block", "Layout", "most_bytes", "place", "plan_layout"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Offsets and sizes of a plan's tiers.

    Attributes:
        offsets: By swapped storage: where it begins in its tier, a multiple of :data:`ALIGNMENT`.
        tier_bytes: Size of each tier.
    """

    offsets: Mapping[int, int]
    tier_bytes: Mapping[Tier, int]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """What is to be placed: ``num_bytes`` at ticks ``begin <= t < end``."""

    num_bytes: int
    begin: int
    end: int


def plan_layout(graph: StepGraph, plan: MemoryPlan) -> Layout:
    """Lay out what a plan swaps."""
    stays = Stays(graph)
    ends = stays.ends(d.storage for d in plan.decisions if d.action == "recompute")
    offsets: dict[int, int] = {}
    tier_bytes: dict[Tier, int] = {}
    for tier in get_args(Tier):
        swapped = [d.storage for d in plan.decisions if d.action == "swap" and d.tier == tier and d.storage in ends]
        blocks = [
            Block(num_bytes=stored_bytes(graph.storages[s].num_bytes), begin=stays.begin[s], end=ends[s])
            for s in swapped
        ]
        found, tier_bytes[tier] = place(blocks)
        offsets.update(zip(swapped, found, strict=True))
    return Layout(offsets=offsets, tier_bytes=tier_bytes)


_ORDERS: tuple[Callable[[Block], tuple[int, ...]], ...] = (
    lambda block: (block.begin, -block.end),
    lambda block: (block.begin - block.end, block.begin),
    lambda block: (-block.num_bytes, block.begin),
)


def place(blocks: Sequence[Block]) -> tuple[list[int], int]:
    """Offsets of blocks, and the bytes that they take together."""
    least = most_bytes(blocks)
    best: list[int] = []
    size = -1
    for key in _ORDERS:
        offsets = _first_fit(blocks, sorted(range(len(blocks)), key=lambda i: key(blocks[i])))
        top = max((at + block.num_bytes for at, block in zip(offsets, blocks, strict=True)), default=0)
        if size < 0 or top < size:
            best, size = offsets, top
        if size == least:
            break
    return best, size


def most_bytes(blocks: Sequence[Block]) -> int:
    """The most bytes at one tick: no placement takes less."""
    changes = [(b.begin, b.num_bytes) for b in blocks if b.begin < b.end]
    changes += [(b.end, -b.num_bytes) for b in blocks if b.begin < b.end]
    now = most = 0
    for _, change in sorted(changes):
        now += change
        most = max(most, now)
    return most


def _first_fit(blocks: Sequence[Block], order: Sequence[int]) -> list[int]:
    """Place blocks one after another, each at the lowest offset that is free during its whole stay."""
    begins, ends, lows, highs = (np.zeros(len(blocks), dtype=np.int64) for _ in range(4))
    offsets = [0] * len(blocks)
    for k, i in enumerate(order):
        block = blocks[i]
        meets = np.flatnonzero((begins[:k] < block.end) & (ends[:k] > block.begin))
        offset = _lowest_gap(lows[meets], highs[meets], block.num_bytes)
        offsets[i] = offset
        begins[k], ends[k], lows[k], highs[k] = block.begin, block.end, offset, offset + block.num_bytes
    return offsets


def _lowest_gap(lows: npt.NDArray[np.int64], highs: npt.NDArray[np.int64], num_bytes: int) -> int:
    """The lowest offset at which a number of bytes meets none of the ranges."""
    if not len(lows):
        return 0
    by_low = np.argsort(lows, kind="stable")
    floors = np.concatenate(([0], np.maximum.accumulate(highs[by_low])))
    fits = np.flatnonzero(lows[by_low] - floors[:-1] >= num_bytes)
    return int(floors[fits[0]] if len(fits) else floors[-1])
