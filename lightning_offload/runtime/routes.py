"""Routes: what a step is followed by under a plan that was not made for its very structure.

Data alone, compiled with the plan. :mod:`.follow` has the followers that go by it.
"""

from __future__ import annotations

import dataclasses
import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from heapq import heappop, heappush

from lightning_offload.graph.memory_plan import Decision
from lightning_offload.graph.step_graph import StepGraph
from lightning_offload.tensors.saved_forms import SavedForm

NUM_SURE = 3
"""Consecutive saves that tell a place, wherever else they come."""

NUM_UNIQUE = 2
"""Consecutive saves that do where they come once."""


@dataclasses.dataclass(frozen=True, slots=True)
class SizeRoute:
    """Of a plan that was made elsewhere.

    Attributes:
        matters: By pack: whether what it saves leaves the device.
        modules: By pack: the module that saves it.
        unpacks: By pack: the ordinals of its unpacks.
    """

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
            matters=tuple(storage in decisions for storage in storages),
            modules=tuple(save.module for save in graph.saves),
            unpacks=_unpacks(graph),
        )


class FormPlaces:
    """Where in a plan a tensor may be saved, by what it looks like. Forms come again: each is looked for once.

    Args:
        forms: By pack: what is saved, with open sizes.
    """

    def __init__(self, forms: Sequence[SavedForm]) -> None:
        self._places: dict[SavedForm, list[int]] = {}
        for place, form in enumerate(forms):
            self._places.setdefault(form, []).append(place)
        self._known: dict[SavedForm, tuple[Sequence[int], Collection[int]]] = {}

    def find(self, recent: Sequence[SavedForm], begin: int, end: int, *, is_unique: bool) -> int:
        """Where consecutive saves are, by the last of them; -1 for nowhere.

        Args:
            recent: What they save.
            begin: The first place to look at.
            end: Where they must have come to an end.
            is_unique: Whether only where that is so once.
        """
        known = [self._admitting(form) for form in recent]
        rarest = min(range(len(known)), key=lambda i: len(known[i][0]))
        places = known[rarest][0]
        others = [(i - rarest, all_places) for i, (_, all_places) in enumerate(known) if i != rarest]
        found = -1
        first, last = begin + rarest, end - len(recent) + rarest
        for place in itertools.islice(places, bisect_left(places, first), bisect_right(places, last)):
            if all(place + offset in all_places for offset, all_places in others):
                if found >= 0:
                    return -1
                found = place - rarest + len(recent) - 1
                if not is_unique:
                    break
        return found

    def _admitting(self, form: SavedForm) -> tuple[Sequence[int], Collection[int]]:
        """The places that admit a form, in order, and as a set."""
        found = self._known.get(form)
        if found is None:
            if len(self._known) >= _MAX_FORMS:
                self._known.clear()
            places = sorted(
                itertools.chain.from_iterable(its for planned, its in self._places.items() if planned.admits(form))
            )
            found = self._known[form] = (places, frozenset(places))
        return found


_MAX_FORMS = 4096  # forms of steps whose routes are kept


@dataclasses.dataclass(frozen=True, slots=True)
class FormRoute:
    """Of a plan for another structure.

    Attributes:
        forms: By pack: what is saved, with open sizes.
        storages: By pack: the storage of the graph, where it is the first save of one that the step made; else -1.
        kept_bytes: By pack: what the plan keeps of what the step made, once it is saved, and backward has yet to read.
        unpacks: By pack: the ordinals of its unpacks.
        borders: Packs that a backward comes before.
        releases: By storage: the pack after which its device copy is released, where that is in forward.
        places: By what is saved: where.
    """

    forms: tuple[SavedForm, ...]
    storages: tuple[int, ...]
    kept_bytes: tuple[int, ...]
    unpacks: tuple[tuple[int, ...], ...]
    borders: tuple[int, ...]
    releases: dict[int, int]
    places: FormPlaces

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
        storages, kept, seen = [], [], set[int]()
        alive: list[tuple[int, int]] = []  # of what the plan keeps: when it goes, and bytes
        kept_bytes = 0
        for save in graph.saves:
            index = graph.values[save.value].storage
            storage = graph.storages[index]
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
        return cls(
            forms=tuple(forms),
            storages=tuple(storages),
            kept_bytes=tuple(kept),
            unpacks=_unpacks(graph),
            borders=borders,
            releases={storage: pack for pack, storages in release_at_pack.items() for storage in storages},
            places=FormPlaces(forms),
        )


def _unpacks(graph: StepGraph) -> tuple[tuple[int, ...], ...]:
    """By pack: the ordinals of its unpacks."""
    ordinals: list[list[int]] = [[] for _ in graph.saves]
    ticks = sorted((tick, pack) for pack, save in enumerate(graph.saves) for tick in save.unpack_ticks)
    for ordinal, (_, pack) in enumerate(ticks):
        ordinals[pack].append(ordinal)
    return tuple(map(tuple, ordinals))
