"""What a relaxation may rely on: where candidates can be absent, what replays certainly run, and the grid of ticks.

Everything here holds for any choice of actions, of what is memoised, and of when copies are made; where it cannot be
known without the choice, the cheaper possibility is taken. Time is a grid of ticks; what has happened by each of them
is a variable.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import cast

import numpy as np

from lightning_offload.graph.device_spec import DeviceSpec
from lightning_offload.planning.problem import Bytes, Candidate, Problem, walk_back
from lightning_offload.planning.relaxation.program import Columns, Floats, LinearProgram, Terms
from lightning_offload.planning.simulator import Timeline

NEVER = 1 << 62
"""A tick that does not come."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """A candidate as a relaxation sees it; other items are named by their place in the list of all.

    Attributes:
        candidate: The storage.
        read_at: First unpack at or after its death, when it must be on the device; :data:`NEVER` if there is none.
        until: First tick at which it cannot be absent any more: its first read or its end; its death if it never can.
        ops: Ops that run whenever its producer is replayed, that one included.
        behind: Items that such a replay reads, which must be at hand then.
        earliest: No op of ``ops`` is replayed before this tick.
        consumers: Items whose replay reads this one, and so may make it on the way.
        sharers: Items whose replay may run its producer without reading it.
        returns: Ticks at which a replay for another item may bring it back before it is read: the first such tick,
            and those of items whose replay reads it, in order; each with the first tick after it, not only of these,
            at which another replay may, or that of its read.
    """

    candidate: Candidate
    read_at: int
    until: int
    ops: tuple[int, ...] = ()
    behind: tuple[int, ...] = ()
    earliest: int = NEVER
    consumers: tuple[int, ...] = ()
    sharers: tuple[int, ...] = ()
    returns: tuple[tuple[int, int], ...] = ()

    @property
    def is_read(self) -> bool:
        """Whether backward reads it after the program has let go of it."""
        return self.read_at < NEVER


def find_items(problem: Problem, no_recompute: Collection[int] = ()) -> list[Item]:
    """All candidates that some plan swaps or recomputes, with their facts; none of the given storages is recomputed.

    Where all may be, facts are found once for each problem.
    """
    if no_recompute:
        return _find_items(problem, no_recompute)
    if Item not in problem.views:
        problem.views[Item] = _find_items(problem)
    return cast("list[Item]", problem.views[Item])


def _find_items(problem: Problem, no_recompute: Collection[int] = ()) -> list[Item]:
    reads: dict[int, int] = {}
    for unpack in problem.unpacks:
        candidate = problem.candidates.get(unpack.storage)
        if candidate is not None and unpack.tick >= candidate.death:
            reads.setdefault(unpack.storage, unpack.tick)
    items = []
    for s, c in problem.candidates.items():
        if s in no_recompute and c.can_recompute:
            c = c._replace(can_recompute=False)
        read_at = reads.get(s, NEVER)
        if c.can_swap or c.can_recompute:
            items.append(Item(candidate=c, read_at=read_at, until=max(c.death, min(read_at, c.release))))
    return _with_replays(problem, items)


def _with_replays(problem: Problem, items: list[Item]) -> list[Item]:
    earliest, live_until = _earliest_replays(problem), problem.lists.live_until

    def held_after(tick: int) -> Callable[[int], bool]:
        """Whether the program holds a value after a tick, so that it may be used where it lies."""
        return lambda value: bool(live_until[value] > tick)

    place = {item.candidate.value: i for i, item in enumerate(items)}
    consumers: list[set[int]] = [set() for _ in items]
    sharers: list[set[int]] = [set() for _ in items]
    producers = [problem.graph.values[item.candidate.value].producer for item in items]
    makers: dict[int, list[int]] = {}
    for i, op in enumerate(producers):
        makers.setdefault(op, []).append(i)
    found = list(items)
    for i, item in enumerate(items):
        if not item.candidate.can_recompute:
            continue
        begin = earliest[producers[i]]
        ops, behind = walk_back(problem, item.candidate.value, is_held=held_after(begin))
        found[i] = dataclasses.replace(
            item,
            ops=ops,
            behind=tuple(place[v] for v in behind if v in place and items[place[v]].candidate.death <= begin),
            earliest=min(earliest[op] for op in ops),
        )
        possible_ops, possible = walk_back(problem, item.candidate.value)
        for v in possible:
            for k in makers.get(problem.graph.values[v].producer, ()):
                (consumers if items[k].candidate.value == v else sharers)[k].add(i)
        for op in possible_ops:
            for k in makers.get(op, ()):
                sharers[k].add(i)
    found = [
        dataclasses.replace(item, consumers=tuple(sorted(consumers[i] - {i})), sharers=tuple(sorted(sharers[i] - {i})))
        for i, item in enumerate(found)
    ]
    return _with_returns(found)


def _with_returns(items: list[Item]) -> list[Item]:
    """What may be made on the way to one item may be so on the way to whatever that one is made for, and so on.

    Sets of items are the bits of integers, in the order in which the items are read.
    """
    order = sorted(range(len(items)), key=lambda i: items[i].read_at)
    reads = [items[i].read_at for i in order]
    bit = {i: 1 << rank for rank, i in enumerate(order)}
    makers = [0] * len(items)  # those whose replay may make an item
    is_settled = False
    while not is_settled:  # once more only where items share a producer
        is_settled = True
        for i in range(len(items) - 1, -1, -1):
            now = makers[i]
            for s in (*items[i].consumers, *items[i].sharers):
                now |= bit[s] | makers[s]
            is_settled = is_settled and now == makers[i]
            makers[i] = now
    return [dataclasses.replace(item, returns=_returns(items, i, makers[i], reads)) for i, item in enumerate(items)]


def _returns(items: Sequence[Item], i: int, makers: int, reads: Sequence[int]) -> tuple[tuple[int, int], ...]:
    item = items[i]

    def first_after(tick: int) -> int:
        """The first read after a tick of an item whose replay may make this one; that of this one if there is none."""
        rank = bisect.bisect_right(reads, tick)
        later = makers >> rank
        read = reads[rank + (later & -later).bit_length() - 1] if later else item.until
        return min(read, item.until)

    ticks = {items[s].read_at for s in item.consumers} | {first_after(-1)}
    chosen = sorted({max(tick, item.candidate.death) for tick in ticks if tick < item.until})
    return tuple((tick, first_after(tick)) for tick in chosen)


def _earliest_replays(problem: Problem) -> list[int]:
    """By op: a tick before which it is never replayed; consumers come after producers, so one pass back suffices."""
    graph, live_until = problem.graph, problem.lists.live_until
    ticks = sorted(unpack.tick for unpack in problem.unpacks if unpack.storage in problem.candidates)
    reads: dict[int, list[int]] = {}
    for unpack in problem.unpacks:
        if unpack.storage in problem.candidates:
            reads.setdefault(unpack.value, []).append(unpack.tick)
    wanted = [NEVER] * len(graph.values)
    earliest = [NEVER] * len(graph.ops)
    for i in range(len(graph.ops) - 1, -1, -1):
        op = graph.ops[i]
        if not op.replayable:
            continue
        for v in op.outputs:
            dead = live_until[v]
            own = reads.get(v, [])
            at = _next(own, dead)
            if wanted[v] < NEVER:
                at = min(at, _next(ticks, max(dead, wanted[v])))
            earliest[i] = min(earliest[i], at)
        for v in op.inputs:
            wanted[v] = min(wanted[v], earliest[i])
    return earliest


def _next(ticks: list[int], tick: int) -> int:
    at = bisect.bisect_left(ticks, tick)
    return ticks[at] if at < len(ticks) else NEVER


Events = list[tuple[int, Terms]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is relaxed.

    Attributes:
        problem: The step.
        device: Where it runs.
        items: The candidates that may leave.
        plain: The step with everything kept.
        excess: By tick: bytes over the budget with everything kept.
        starts: By tick: seconds of the ops before it; one more entry for the end.
    """

    problem: Problem
    device: DeviceSpec
    items: Sequence[Item]
    plain: Timeline
    excess: Bytes
    starts: Floats

    @classmethod
    def of(
        cls,
        problem: Problem,
        device: DeviceSpec,
        plain: Timeline,
        budget_bytes: int,
        no_recompute: Collection[int] = (),
    ) -> Case:
        """The case of a budget; some storages may be forbidden to be recomputed."""
        return cls(
            problem=problem,
            device=device,
            items=find_items(problem, no_recompute),
            plain=plain,
            excess=plain.memory - budget_bytes,
            starts=np.concatenate(([0.0], np.cumsum(problem.seconds))),
        )


class Clock:
    """Cumulative replays and stalls at a grid of ticks.

    Args:
        program: Where variables and rows go.
        case: What is relaxed.
        grid: Ticks, in order.
        unit: What a second is in the program.
        most_replays: The most that replays may take, in the program's units.
        most_stalls: The same for stalls.

    Attributes:
        grid: Ticks, in order.
        replays: By place in the grid: time of the replays at earlier ticks; one more entry for the end.
        stalls: By place in the grid: time of the waits at ticks up to there; one more entry for the end.
    """

    def __init__(
        self,
        program: LinearProgram,
        case: Case,
        grid: Sequence[int],
        *,
        unit: float,
        most_replays: float,
        most_stalls: float,
    ) -> None:
        self.grid = np.array(grid, dtype=np.int64)
        self._program = program
        self._starts = case.starts * unit
        self._unpack_ticks = case.problem.unpack_ticks
        self.replays = program.variables([most_replays] * (len(grid) + 1))
        self.stalls = program.variables([most_stalls] * (len(grid) + 1))
        for columns in (self.replays, self.stalls):
            for earlier, later in itertools.pairwise(columns):
                program.at_most([(earlier, 1.0), (later, -1.0)], 0.0)

    def __len__(self) -> int:
        return len(self.grid)

    def start(self, tick: int) -> float:
        """Plain time at a tick."""
        return float(self._starts[tick])

    def spent(self, first: int, last: int) -> Terms:
        """Replays and stalls between two places in the grid, -1 being the step's begin."""
        terms = [(self.replays[last], 1.0), (self.stalls[last], 1.0)]
        if first >= 0:
            terms += [(self.replays[first], -1.0), (self.stalls[first], -1.0)]
        return terms

    def waits(self, g: int) -> Terms:
        """Stalls between the place before in the grid and this one, those at this one's tick included."""
        return [(self.stalls[g], 1.0), *([(self.stalls[g - 1], -1.0)] if g else [])]

    def between(self, g: int) -> float:
        """Plain time from the place before in the grid to this one."""
        return self.start(self.grid[g]) - (self.start(self.grid[g - 1]) if g else 0.0)

    def next_unpack(self, tick: int) -> int:
        """The first unpack after a tick, :data:`NEVER` if there is none."""
        at = int(np.searchsorted(self._unpack_ticks, tick, side="right"))
        return int(self._unpack_ticks[at]) if at < len(self._unpack_ticks) else NEVER

    def sums(self, events: Iterable[tuple[int, Terms]], most: float) -> Columns:
        """Sums of what has happened at ticks up to each one of the grid, as variables of at most a value."""
        buckets: list[Terms] = [[] for _ in self.grid]
        for tick, terms in events:
            g = int(np.searchsorted(self.grid, tick))
            if g < len(buckets):
                buckets[g] += terms
        return self._accumulate(buckets, most)

    def sums_from(self, events: Iterable[tuple[int, Terms]], most: float) -> Columns:
        """The same for ticks from each one of the grid on; what never happens is left out."""
        buckets: list[Terms] = [[] for _ in self.grid]
        for tick, terms in events:
            g = int(np.searchsorted(self.grid, tick, side="right")) - 1
            if g >= 0 and tick < NEVER:
                buckets[g] += terms
        return self._accumulate(buckets[::-1], most)[::-1]

    def _accumulate(self, buckets: Sequence[Terms], most: float) -> Columns:
        columns = self._program.variables([most] * len(buckets))
        previous: Terms = []
        for column, terms in zip(columns, buckets, strict=True):
            self._program.equals([*previous, *terms, (column, -1.0)], 0.0)
            previous = [(column, 1.0)]
        return columns
