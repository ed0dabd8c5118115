"""Where a step is in a plan that was made for another structure: it has parts that the plan lacks, or lacks some.

A step is followed by what autograd saves in it: by types and shapes (:mod:`~lightning_offload.tensors.saved_forms`), in
order. Layers of a stack look alike, so one that was left out shows where the stack ends, which is as good. What does
not continue the plan is *astray*. The step comes back to its plan where the last few saves look like consecutive ones
of it further on: three of them, or two that are unique there.

A backward between two saves is a border, at which much of what was kept goes: the step is not taken to be beyond one
that it has not come by, nor before one that it has.

The plan's order only moves forward, so that each of its places is taken once.
"""

from __future__ import annotations

import dataclasses
import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from heapq import heappop, heappush

from lightning_offload.graph.memory_plan import Decision
from lightning_offload.graph.step_graph import StepGraph
from lightning_offload.tensors.saved_forms import SavedForm

_Kinds = tuple[tuple[object, int], ...]
_NUM_SURE = 3
_NUM_UNIQUE = 2
_NUM_BORDERS = 8  # among which the one is sought that a step has come by


@dataclasses.dataclass(frozen=True, slots=True)
class Route:
    """What a step of another structure follows a plan by.

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
    starts: dict[_Kinds, list[int]]

    @classmethod
    def of(
        cls,
        graph: StepGraph,
        decisions: dict[int, Decision],
        forms: Sequence[SavedForm],
        release_at_pack: Mapping[int, Iterable[int]],
    ) -> Route:
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
        ordinals: list[list[int]] = [[] for _ in graph.saves]
        ticks = sorted((tick, pack) for pack, save in enumerate(graph.saves) for tick in save.unpack_ticks)
        for ordinal, (_, pack) in enumerate(ticks):
            ordinals[pack].append(ordinal)
        unpacks = [tick for tick, _ in ticks]
        borders = tuple(
            place
            for place, (before, save) in enumerate(itertools.pairwise(graph.saves), 1)
            if bisect_left(unpacks, before.pack_tick) < bisect_left(unpacks, save.pack_tick)
        )
        starts: dict[_Kinds, list[int]] = {}
        kinds = tuple(form.kind for form in forms)
        for length in (_NUM_UNIQUE, _NUM_SURE):
            for place in range(len(kinds) - length + 1):
                starts.setdefault(kinds[place : place + length], []).append(place)
        return cls(
            forms=tuple(forms),
            storages=tuple(storages),
            is_given=tuple(is_given),
            kept_bytes=tuple(kept),
            unpacks=tuple(map(tuple, ordinals)),
            borders=borders,
            releases={storage: pack for pack, storages in release_at_pack.items() for storage in storages},
            starts=starts,
        )


class PackCursor:
    """Where a step is on a route.

    Attributes:
        place: Packs of the route that are behind.
        num_astray: Packs in a row that it does not have.
    """

    def __init__(self, route: Route) -> None:
        self._route = route
        self._recent: list[SavedForm] = []
        self._end = route.borders[0] if route.borders else len(route.forms)
        self.place = 0
        self.num_astray = 0

    def next(self, form: SavedForm, *, is_border: bool = False) -> int:
        """The place of the pack that comes now; -1 where it is astray.

        Args:
            form: What it saves.
            is_border: Whether there was a backward since the pack before it.
        """
        if is_border:
            self._cross(form)
        forms, place = self._route.forms, self.place
        if place < self._end and forms[place].admits(form):
            self._go_on(place)
            return place
        recent = self._recent
        recent.append(form)
        del recent[:-_NUM_SURE]
        self.num_astray += 1
        found = self._found(_NUM_UNIQUE, is_unique=True)
        if found < 0:
            found = self._found(_NUM_SURE, is_unique=False)
        if found >= 0:
            self._go_on(found)
        return found

    def _cross(self, form: SavedForm) -> None:
        """Go on behind the plan's next border, or behind one of those after it where that is what comes now."""
        borders, num_packs = self._route.borders, len(self._route.forms)
        first = bisect_left(borders, self._end)
        near = range(first, min(first + _NUM_BORDERS, len(borders)))
        chosen = next((i for i in near if self._route.forms[borders[i]].admits(form)), first)
        self.place = borders[chosen] if chosen < len(borders) else num_packs
        self._end = borders[chosen + 1] if chosen + 1 < len(borders) else num_packs
        self._recent.clear()

    def _go_on(self, place: int) -> None:
        self.place, self.num_astray = place + 1, 0
        if self._recent:
            self._recent.clear()

    def _found(self, length: int, *, is_unique: bool) -> int:
        """Where the last few packs are before the next border, by the last of them; -1 for nowhere."""
        recent = self._recent[-length:]
        if len(recent) < length:
            return -1
        starts = self._route.starts.get(tuple(form.kind for form in recent), [])
        reachable = starts[bisect_left(starts, self.place) : bisect_right(starts, self._end - length)]
        admitted = [start for start in reachable if self._admits(start, recent)]
        if not admitted or (is_unique and len(admitted) > 1):
            return -1
        return admitted[0] + length - 1

    def _admits(self, start: int, recent: Sequence[SavedForm]) -> bool:
        forms = self._route.forms[start : start + len(recent)]
        return all(planned.admits(form) for planned, form in zip(forms, recent, strict=True))
