"""Predicts memory over time and the duration of a step under a choice of actions.

Memory is exact by construction, at the granularity of ticks: a plan fixes the op before which the device copy of a
swap is released and the unpack at which its copy back is issued, and the runtime waits rather than exceed them,
whatever the speed of the link. Only time depends on the performance model: FIFO lanes for the copies
(:mod:`~.links`), ops and replays one after another on the compute lane, and compute slowed down by the share of the
copies that the device's ``copy_interference`` says. Which swaps go to disk follows from the choice of actions and the
device (:mod:`~.tiers`).

A simulation makes three passes over flat columns (:mod:`~.arrays`, :mod:`~.kernels`): what backward needs
(:func:`residency`), when copies are made and the memory that follows, and the time of it all. :func:`simulate` speaks
of storages; a search that tries many choices uses a :class:`Simulator`, which takes and gives arrays.

The first pass walks the unpacks in order and does what the runtime would: what is still alive is used, swapped
storages are brought back, recomputed ones are replayed from what is at hand, and values made on the way stay for
their own unpack if they are memoised. A replayed value needs its inputs until it is replayed, so their stay is
extended.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple, final

import numpy as np
import numpy.typing as npt

from lightning_offload.graph.device_spec import DeviceSpec
from lightning_offload.graph.memory_plan import Action, Tier
from lightning_offload.planning.arrays import SWAP, Codes, as_lists
from lightning_offload.planning.columns import space_of, walk_columns
from lightning_offload.planning.kernels import PLAIN, Kernels, kernels_for
from lightning_offload.planning.kernels.annealing import NUM_TRIALS
from lightning_offload.planning.kernels.buffers import (
    Annealing,
    Columns,
    Copies,
    Links,
    Moves,
    Needs,
    Seen,
    Space,
    Transfers,
    Walk,
)
from lightning_offload.planning.kernels.needs import hold_inputs, walk
from lightning_offload.planning.kernels.releases import NO_LIMIT
from lightning_offload.planning.links import in_rates, out_rates
from lightning_offload.planning.problem import Bytes, Problem


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """When copies are made, for policies that say so themselves.

    Attributes:
        release: By swapped storage: tick of the op before which its device copy is released; -1, at its pack, for
            the others.
        prefetch: By swapped storage: ordinal of the unpack at which its copy back is issued; -1, on demand, for the
            others. One that comes before the device copy is released, or after its need, is on demand.
        tiers: By swapped storage: where it goes; None to let the device decide.
    """

    release: Mapping[int, int]
    prefetch: Mapping[int, int]
    tiers: Mapping[int, Tier] | None = None


ON_DEMAND = Schedule(release={}, prefetch={})
"""Every copy is waited for."""


class Outcome(NamedTuple):
    """What a search wants to know of a simulated step.

    Attributes:
        peak_bytes: Most bytes on the device at once.
        step_seconds: Duration.
        stall_seconds: Time that compute waits for copies.
        overflow_bytes: By how much the host would have to be larger; a choice with any is infeasible.
    """

    peak_bytes: int
    step_seconds: float
    stall_seconds: float
    overflow_bytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """A simulated step.

    Attributes:
        memory: Live device bytes at each tick.
        peak_bytes: Its maximum.
        peak_tick: Where that is.
        step_seconds: Duration.
        stall_seconds: Time that compute waits for copies.
        release_tick: By swapped storage: tick at which its device copy is released; -1 at its pack.
        prefetch: By swapped storage: ordinal of the unpack at which its copy back is issued; -1 on demand. In the order
            of their needs, which is that of copies issued at the same unpack.
        tiers: By swapped storage: where it goes.
        out_seconds: By swapped storage: when its copy out ends.
        in_seconds: By swapped storage: when its copy back ends; without those that are not copied back.
        host_peak_bytes: Most bytes on the host at once, each storage rounded up to what it takes there.
        disk_peak_bytes: The same for the disk.
        overflow_bytes: By how much the host would have to be larger; a choice with any is infeasible.
    """

    memory: Bytes
    peak_bytes: int
    peak_tick: int
    step_seconds: float
    stall_seconds: float
    release_tick: Mapping[int, int]
    prefetch: Mapping[int, int]
    tiers: Mapping[int, Tier]
    out_seconds: Mapping[int, float]
    in_seconds: Mapping[int, float]
    host_peak_bytes: int
    disk_peak_bytes: int
    overflow_bytes: int


Actions = Mapping[int, Action]


@dataclasses.dataclass(slots=True)
class Residency:
    """What backward needs, by storage and by tick.

    Attributes:
        needed_at: First tick at which a swapped or recomputed storage must be on the device.
        held_until: First tick at which nobody needs it any more.
        replay_seconds: Time of the replays at an unpack's tick.
        transient_bytes: Memory of those replays beyond the values that stay.
        num_replayed: Ops replayed.
    """

    needed_at: dict[int, int]
    held_until: dict[int, int]
    replay_seconds: dict[int, float]
    transient_bytes: dict[int, int]
    num_replayed: int = 0


def residency(problem: Problem, actions: Actions, no_memo: frozenset[int] = frozenset()) -> Residency:
    """Walk the step's unpacks under a choice of actions (storages without one are kept)."""
    columns = walk_columns(problem, is_compiled=False)
    _write(columns, problem.codes(actions), problem.flags(no_memo), PLAIN)
    step, needs = problem.columns(False), columns.needs
    is_done = walk(step, *columns, float("inf"))
    assert is_done
    hold_inputs(step, columns.codes, needs, columns.scratch)
    saved = problem.saved_storages
    ticks = problem.lists.wanted_tick
    replayed = [k for k, num_calls in enumerate(needs.num_calls) if num_calls]
    return Residency(
        needed_at={saved[i]: tick for i, tick in enumerate(needs.needed) if tick >= 0},
        held_until={**problem.release, **dict(zip(saved, needs.held, strict=True))},
        replay_seconds={ticks[k]: needs.seconds[k] for k in replayed},
        transient_bytes={ticks[k]: needs.transient[k] for k in replayed},
        num_replayed=sum(needs.num_calls),
    )


def _write(columns: Walk, codes: Codes, no_memo: npt.NDArray[np.bool_] | None, kernels: Kernels) -> None:
    """Note a choice."""
    columns.codes[: len(codes)] = codes if kernels.is_compiled else codes.tolist()
    if no_memo is None:
        columns.no_memo[:] = False if kernels.is_compiled else [False] * len(codes)
    else:
        columns.no_memo[:] = no_memo if kernels.is_compiled else no_memo.tolist()


def simulate(
    problem: Problem,
    actions: Actions,
    device: DeviceSpec,
    *,
    limit_bytes: int | None = None,
    no_memo: frozenset[int] = frozenset(),
    schedule: Schedule | None = None,
) -> Timeline:
    """Simulate a step.

    Args:
        problem: The step.
        actions: What happens to each candidate storage; those without an action are kept.
        device: Links, tiers and overheads.
        limit_bytes: Releases and prefetches are chosen so that memory stays below this where they can.
        no_memo: Recomputed storages that are not kept when they are replayed on the way to another.
        schedule: When to release and to prefetch; by default chosen for the limit.
    """
    simulator = Simulator(problem, device, limit_bytes)
    return simulator.timeline(problem.codes(actions), problem.flags(no_memo) if no_memo else None, schedule=schedule)


class _Pass(NamedTuple):
    """One simulation, in the columns of its kernels; the next one writes over them."""

    needs: Needs
    columns: Columns
    copies: Copies
    peak_tick: int
    outcome: Outcome


@final
class Simulator:
    """Simulates one step on one device many times, for searches.

    A choice is an array of action codes, one for each candidate in the order of ``problem.candidates``
    (``problem.order[i]`` is the storage of candidate i; ``problem.codes`` and ``problem.actions`` translate), and
    optionally an array that flags the candidates that are not memoised. Arrays are read, never kept or changed.
    One simulation at a time: compiled loops write over the columns of the one before.

    Args:
        problem: The step.
        device: Links, tiers and overheads.
        limit_bytes: Releases and prefetches are chosen so that memory stays below this where they can.
        kernels: The form of the inner loops; by default the one that pays off.
    """

    def __init__(
        self,
        problem: Problem,
        device: DeviceSpec,
        limit_bytes: int | None = None,
        *,
        kernels: Kernels | None = None,
    ) -> None:
        self.problem = problem
        self.device = device
        self._limit = NO_LIMIT if limit_bytes is None else limit_bytes
        self._kernels = kernels
        self._spaces: dict[bool, tuple[Space, Links]] = {}

    def run(
        self,
        codes: Codes,
        no_memo: npt.NDArray[np.bool_] | None = None,
        *,
        schedule: Schedule | None = None,
        max_seconds: float = float("inf"),
    ) -> Outcome:
        """Peak, duration and whether the tiers hold it, as :meth:`timeline` would say, without the rest of it.

        Args:
            codes: By candidate: 0 keep, 1 swap, 2 recompute.
            no_memo: By candidate: whether it is not kept when it is replayed on the way to another; all are by default.
            schedule: When to release and to prefetch; by default chosen for the limit.
            max_seconds: Where replays alone make the step longer than this, the simulation is given up, and the
                outcome is that of a step that never ends: chains without memo are long to simulate.
        """
        return self._simulate(codes, no_memo, schedule, max_seconds).outcome

    def anneal(self, moves: Moves, seen: Seen, run: Annealing, draws: npt.NDArray[np.float64], until: int) -> None:
        """Go on with a search; cf. :func:`~lightning_offload.planning.kernels.annealing.anneal`.

        Args:
            moves: What may be changed, in arrays.
            seen: What was simulated before; written.
            run: The search; written.
            draws: Random numbers from 0 to 1.
            until: Trials in all after which it pauses.
        """
        problem, num_left = self.problem, until - int(run.counts[NUM_TRIALS])
        kernels = self._kernels or kernels_for(num_left * problem.num_rows, is_urgent=problem.is_urgent)
        where = (problem.columns(kernels.is_compiled), *self._space(kernels), self._limit)
        if kernels.is_compiled:
            kernels.anneal(*where, problem.plain_seconds, moves, seen, run, draws, until)
            return
        lists = [as_lists(columns) for columns in (moves, seen, run)]
        kernels.anneal(*where, problem.plain_seconds, *lists, draws.tolist(), until)
        for column, found in zip((*seen, *run), (*lists[1], *lists[2]), strict=True):
            if isinstance(column, np.ndarray):
                column[:] = found

    def timeline(
        self,
        codes: Codes,
        no_memo: npt.NDArray[np.bool_] | None = None,
        *,
        schedule: Schedule | None = None,
    ) -> Timeline:
        """The whole step under a choice.

        Args:
            codes: By candidate: 0 keep, 1 swap, 2 recompute.
            no_memo: By candidate: whether it is not kept when it is replayed on the way to another; all are by default.
            schedule: When to release and to prefetch; by default chosen for the limit.
        """
        made, is_given = self._simulate(codes, no_memo, schedule, float("inf")), schedule is not None
        swapped = np.flatnonzero(codes == SWAP)
        needs, transfers, lanes = made.needs, made.columns.transfers, made.copies.lanes
        release, prefetch, needed, memory = (
            transfers.release,
            made.copies.prefetch,
            needs.needed,
            made.copies.room.memory,
        )
        named = [(i, int(self.problem.order[i])) for i in swapped.tolist()]
        return Timeline(
            memory=np.array(memory[: self.problem.graph.num_ticks + 1], dtype=np.int64),
            peak_bytes=made.outcome.peak_bytes,
            peak_tick=made.peak_tick,
            step_seconds=made.outcome.step_seconds,
            stall_seconds=made.outcome.stall_seconds,
            release_tick={s: int(release[i]) for i, s in named},
            prefetch={s: int(prefetch[i]) for i, s in self._by_need(named, needed) if is_given or needed[i] >= 0},
            tiers={s: "disk" if transfers.on_disk[i] else "host" for i, s in named},
            out_seconds={s: float(lanes.out_end[i]) for i, s in named},
            in_seconds={s: float(lanes.in_end[i]) for i, s in named if lanes.in_end[i] >= 0},
            host_peak_bytes=self._stored_peak(needs, [i for i, _ in named if not transfers.on_disk[i]]),
            disk_peak_bytes=self._stored_peak(needs, [i for i, _ in named if transfers.on_disk[i]]),
            overflow_bytes=made.outcome.overflow_bytes,
        )

    def _by_need(self, named: list[tuple[int, int]], needed: Any) -> list[tuple[int, int]]:
        """Candidates in the order in which copies back are issued at one unpack."""
        by_pack = self.problem.arrays.by_pack
        place = np.empty(len(by_pack), dtype=np.int64)
        place[by_pack] = np.arange(len(by_pack))
        return sorted(named, key=lambda pair: (needed[pair[0]], -place[pair[0]]))

    def _simulate(
        self, codes: Codes, no_memo: npt.NDArray[np.bool_] | None, schedule: Schedule | None, max_seconds: float
    ) -> _Pass:
        problem = self.problem
        kernels = self._kernels or kernels_for(problem.num_rows, is_urgent=problem.is_urgent)
        space, links = self._space(kernels)
        kernels.reset(space.resets_of_walk)
        kernels.reset(space.resets)
        _write(space.walk, codes, no_memo, kernels)
        if schedule is not None:
            self._follow(schedule, space.columns.transfers)
        found = kernels.simulate(
            problem.columns(kernels.is_compiled), space, links, self._limit,
            max_seconds - problem.plain_seconds, schedule is not None,
        )  # fmt: skip
        is_second, tick, peak_bytes, seconds, stall_seconds, overflow_bytes = found
        copies = space.second if is_second else space.first
        outcome = Outcome(int(peak_bytes), seconds, stall_seconds, overflow_bytes)
        return _Pass(space.walk.needs, space.columns, copies, tick, outcome)

    def _stored_peak(self, needs: Needs, swapped: list[int]) -> int:
        """Most bytes of these at once, on their tier."""
        arrays, ends = self.problem.arrays, np.asarray(needs.stored, dtype=np.int64)[swapped]
        delta = np.zeros(self.problem.graph.num_ticks + 1, dtype=np.int64)
        np.add.at(delta, arrays.pack[swapped], arrays.stored_size[swapped])
        np.subtract.at(delta, ends, arrays.stored_size[swapped])
        return int(np.cumsum(delta).max())

    def _space(self, kernels: Kernels) -> tuple[Space, Links]:
        is_compiled = kernels.is_compiled
        if is_compiled not in self._spaces:
            self._spaces[is_compiled] = space_of(self.problem, is_compiled=is_compiled), self._links(is_compiled)
        return self._spaces[is_compiled]

    def _links(self, is_compiled: bool) -> Links:
        device, host_bytes = self.device, self.device.host_memory_bytes
        overheads = [device.copy_overhead(num_bytes) for num_bytes in self.problem.arrays.size.tolist()]
        return Links(
            out_rates(device),
            in_rates(device),
            np.array(overheads, dtype=np.float64) if is_compiled else overheads,
            float(device.replay_overhead),
            float(device.copy_interference),
            NO_LIMIT if host_bytes is None else host_bytes,
            device.has_disk,
        )

    def _follow(self, schedule: Schedule, transfers: Transfers) -> None:
        """Note what a schedule says."""
        for column, wished in ((transfers.release, schedule.release), (transfers.prefetch, schedule.prefetch)):
            for storage, moment in wished.items():
                column[self.problem.number[storage]] = moment
        for storage, tier in (schedule.tiers or {}).items():
            transfers.given[self.problem.number[storage]] = int(tier == "disk")
