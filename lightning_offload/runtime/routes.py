"""Routes: what a step is followed by under a plan that was not made for its very structure.

Data alone, compiled with the plan. :mod:`.follow` has the followers that go by it.
"""

from __future__ import annotations

import dataclasses
import itertools
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from heapq import heappop, heappush

from lightning_offload.graph.memory_plan import Decision
from lightning_offload.graph.step_graph import StepGraph
from lightning_offload.tensors.saved_forms import SavedForm

Kinds = tuple[tuple[object, int], ...]
"""Kinds of consecutive saves."""

NUM_SURE = 3
"""Consecutive saves that tell a place, wherever else they come."""

NUM_UNIQUE = 2
"""Consecutive saves that do where they come once."""


@dataclasses.dataclass(frozen=True, slots=True)
class SizeRoute:
    """Of a plan that was made elsewhere.

    Attributes:
        pack_bytes: By pack: bytes of the storage behind it; 0 where that is on another device.
        matters: By pack: whether what it saves leaves the device.
        modules: By pack: the module that saves it.
        unpacks: By pack: the ordinals of its unpacks.
    """

    pack_bytes: tuple[int, ...]
    matters: tuple[bool, ...]
    modules: tuple[str, ...]
    unpacks: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, graph: StepGraph, decisions: dict[int, Decision]) -> SizeRoute:
        """The route of a plan.

        Args:
            graph: The step that it was made for.
            decisions: What leaves the device, by storage.
        """
        storages = [graph.values[save.value].storage for save in graph.saves]
        return cls(
            pack_bytes=tuple(graph.storages[storage].num_bytes for storage in storages),
            matters=tuple(storage in decisions for storage in storages),
            modules=tuple(save.module for save in graph.saves),
            unpacks=_unpacks(graph),
        )


@dataclasses.dataclass(frozen=True, slots=True)
class FormRoute:
    """Of a plan for another structure.

    Attributes:
        forms: By pack: what is saved, with open sizes.
        storages: By pack: the storage of the graph, where it is the first save of one that the step made; else -1.
        is_given: By pack: whether it is of what was there before the step.
        kept_bytes: By pack: what the plan keeps of what the step made, once it is saved, and backward has yet to read.
        unpacks: By pack: the ordinals of its unpacks.
        borders: Packs that a backward comes before.
        releases: By storage: the pack after which its device copy is released, where that is in forward.
        starts: Where so many saves of some kinds begin, in order.
    """

    forms: tuple[SavedForm, ...]
    storages: tuple[int, ...]
    is_given: tuple[bool, ...]
    kept_bytes: tuple[int, ...]
    unpacks: tuple[tuple[int, ...], ...]
    borders: tuple[int, ...]
    releases: dict[int, int]
    starts: dict[Kinds, list[int]]

    @classmethod
    def of(
        cls,
        graph: StepGraph,
        decisions: dict[int, Decision],
        forms: Sequence[SavedForm],
        release_at_pack: Mapping[int, Iterable[int]],
    ) -> FormRoute:
        """The route of a plan.

        Args:
            graph: The step that it was made for.
            decisions: What leaves the device, by storage.
            forms: By pack: what is saved.
            release_at_pack: By pack: the storages whose device copies are released after it.
        """
        assert len(forms) == len(graph.saves)
        last = {value.storage: v for v, value in enumerate(graph.values)}
        gone_at: dict[int, int] = {}
        for save in graph.saves:
            index = graph.values[save.value].storage
            gone_at[index] = max(gone_at.get(index, 0), save.release_tick)
        storages, is_given, kept, seen = [], [], [], set[int]()
        alive: list[tuple[int, int]] = []  # of what the plan keeps: when it goes, and bytes
        kept_bytes = 0
        for save in graph.saves:
            index = graph.values[save.value].storage
            storage = graph.storages[index]
            is_given.append(storage.is_persistent)
            is_first = index not in seen and not storage.is_persistent
            seen.add(index)
            may_leave = is_first and last[index] == save.value
            storages.append(index if is_first and (may_leave or index not in decisions) else -1)
            while alive and alive[0][0] <= save.pack_tick:
                kept_bytes -= heappop(alive)[1]
            if is_first and not (may_leave and index in decisions):
                kept_bytes += storage.num_bytes
                heappush(alive, (gone_at[index], storage.num_bytes))
            kept.append(kept_bytes)
        ticks = sorted(tick for save in graph.saves for tick in save.unpack_ticks)
        borders = tuple(
            place
            for place, (before, save) in enumerate(itertools.pairwise(graph.saves), 1)
            if bisect_left(ticks, before.pack_tick) < bisect_left(ticks, save.pack_tick)
        )
        starts: dict[Kinds, list[int]] = {}
        kinds = tuple(form.kind for form in forms)
        for length in (NUM_UNIQUE, NUM_SURE):
            for place in range(len(kinds) - length + 1):
                starts.setdefault(kinds[place : place + length], []).append(place)
        return cls(
            forms=tuple(forms),
            storages=tuple(storages),
            is_given=tuple(is_given),
            kept_bytes=tuple(kept),
            unpacks=_unpacks(graph),
            borders=borders,
            releases={storage: pack for pack, storages in release_at_pack.items() for storage in storages},
            starts=starts,
        )


def _unpacks(graph: StepGraph) -> tuple[tuple[int, ...], ...]:
    """By pack: the ordinals of its unpacks."""
    ordinals: list[list[int]] = [[] for _ in graph.saves]
    ticks = sorted((tick, pack) for pack, save in enumerate(graph.saves) for tick in save.unpack_ticks)
    for ordinal, (_, pack) in enumerate(ticks):
        ordinals[pack].append(ordinal)
    return tuple(map(tuple, ordinals))
