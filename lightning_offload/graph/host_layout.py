"""Where swapped storages lie in their tiers, and for how long.

A copy stays from its storage's first pack until autograd has dropped it: not only until it was read back, since it
may be read again. A replay holds what it reads, so where a recomputed storage reads it, directly or through others
that are recomputed, the stay lasts until that one is dropped. Stays depend on which storages are recomputed, and on
nothing else.

No two copies that are there at the same time may overlap: offline dynamic storage allocation, which is NP-hard in
general. Backward reads in the reverse order of forward, so most stays nest, and for stays that nest, placing each at
the lowest offset that is free all along is optimal. It is done in three orders (by begin, longest first, largest
first), and the best is taken; cf. Gergov, "Algorithms for compile-time memory optimization" (SODA 1999), for what can
be guaranteed otherwise.

A runtime may take an offset as a hint: a step can differ from the one that was recorded.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar, get_args

import numpy as np
import numpy.typing as npt

from lightning_offload.graph.memory_plan import MemoryPlan, Tier
from lightning_offload.graph.step_graph import StepGraph, by_structure, last_values

ALIGNMENT = 4096
"""Bytes; direct access to a disk needs it, and memory comes in such pages."""


_Size = TypeVar("_Size", int, npt.NDArray[np.int64])


def stored_bytes(num_bytes: _Size) -> _Size:
    """What a storage of this size takes on a tier, or each of an array of storages."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


class LiveRanges:
    """Stays of all saved storages of a graph.

    Attributes:
        begin: By storage: tick of its first pack.
        dropped: By storage: first tick at which autograd has dropped it.
    """

    def __init__(self, graph: StepGraph) -> None:
        self.begin: dict[int, int] = {}
        self.dropped: dict[int, int] = {}
        self._graph = graph
        self._last = last_values(graph)
        self._saved: set[int] = set()
        for save in graph.saves:
            storage = graph.values[save.value].storage
            self.begin[storage] = min(save.pack_tick, self.begin.get(storage, save.pack_tick))
            self.dropped[storage] = max(save.release_tick, self.dropped.get(storage, -1))
            if self._last[storage] == save.value:
                self._saved.add(save.value)

    def ends(self, recomputed: Iterable[int]) -> dict[int, int]:
        """By saved storage: first tick at which nobody may read it any more.

        Args:
            recomputed: Storages that are recomputed.
        """
        values = self._graph.values
        ends = self.dropped.copy()
        until = {v: 0 for s in recomputed if (v := self._last.get(s)) in self._saved}  # by value that replays make
        ops = [-values[v].producer for v in until]  # to be looked at, negated: a heap gives the last op first
        heapq.heapify(ops)
        seen: int | None = None
        # A value reads what was made before it, so whoever reads it comes first.
        while ops:
            i = -heapq.heappop(ops)
            if i == seen or i < 0:
                continue
            seen = i
            made = [v for v in self._graph.ops[i].outputs if v in until]
            end = max((ends[values[v].storage] if v in self._saved else until[v] for v in made), default=0)
            for v in self._graph.ops[i].inputs if end else ():
                storage = values[v].storage
                if self._is_external(v):
                    continue
                if v in self._saved:
                    ends[storage] = max(ends[storage], end)
                else:
                    if v not in until:
                        heapq.heappush(ops, -values[v].producer)
                    until[v] = max(until.get(v, 0), end)
        return ends

    def _is_external(self, value: int) -> bool:
        storage = self._graph.values[value].storage
        return self._graph.storages[storage].is_persistent and self._last[storage] == value


@by_structure
def live_ranges(graph: StepGraph) -> LiveRanges:
    """The stays of a graph; of its storages they depend on which are persistent, as the structure does."""
    return LiveRanges(graph)


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
class Stay:
    """What is to be placed: ``num_bytes`` at ticks ``begin <= t < end``."""

    num_bytes: int
    begin: int
    end: int


def plan_layout(graph: StepGraph, plan: MemoryPlan) -> Layout:
    """Lay out what a plan swaps."""
    stays = live_ranges(graph)
    ends = stays.ends(d.storage for d in plan.decisions if d.action == "recompute")
    offsets: dict[int, int] = {}
    tier_bytes: dict[Tier, int] = {}
    for tier in get_args(Tier):
        swapped = [d.storage for d in plan.decisions if d.action == "swap" and d.tier == tier and d.storage in ends]
        blocks = [
            Stay(num_bytes=stored_bytes(graph.storages[s].num_bytes), begin=stays.begin[s], end=ends[s])
            for s in swapped
        ]
        found, tier_bytes[tier] = place(blocks)
        offsets.update(zip(swapped, found, strict=True))
    return Layout(offsets=offsets, tier_bytes=tier_bytes)


_ORDERS: tuple[Callable[[Stay], tuple[int, ...]], ...] = (
    lambda block: (block.begin, -block.end),
    lambda block: (block.begin - block.end, block.begin),
    lambda block: (-block.num_bytes, block.begin),
)


def place(blocks: Sequence[Stay]) -> tuple[list[int], int]:
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


def most_bytes(blocks: Sequence[Stay]) -> int:
    """The most bytes at one tick: no placement takes less."""
    changes = [(b.begin, b.num_bytes) for b in blocks if b.begin < b.end]
    changes += [(b.end, -b.num_bytes) for b in blocks if b.begin < b.end]
    now = most = 0
    for _, change in sorted(changes):
        now += change
        most = max(most, now)
    return most


def _first_fit(blocks: Sequence[Stay], order: Sequence[int]) -> list[int]:
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
