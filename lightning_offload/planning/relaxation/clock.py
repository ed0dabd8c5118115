"""Time in the program: a grid of ticks, and what has happened by each of them, as variables."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Iterable, Sequence

import numpy as np

from lightning_offload.graph.device_spec import DeviceSpec
from lightning_offload.planning.problem import Bytes, Problem
from lightning_offload.planning.relaxation.facts import NEVER, Item, find_items
from lightning_offload.planning.relaxation.program import Columns, Floats, LinearProgram, Terms
from lightning_offload.planning.simulator import Timeline

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
        grid: Likewise.
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
