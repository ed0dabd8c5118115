"""Predicts memory over time and the duration of a step under a choice of actions.

Memory is exact by construction, at the granularity of ticks: a plan fixes the op before which the device copy
of a swap is released and the unpack at which its copy back is issued, and the runtime waits rather than exceed
them, whatever the speed of the link. Only time depends on the performance model: FIFO lanes for the copies
(:mod:`~.lane_times`), ops and replays one after another on the compute lane, and compute slowed down by the share
of the copies that the device's ``copy_interference`` says. Which swaps go to disk follows from the choice of
actions and the device (:mod:`~.tiers`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from lightning_offload.graph.device_spec import DeviceSpec
from lightning_offload.graph.memory_plan import Tier
from lightning_offload.planning.lane_times import Deadlines, Direction, Lanes, in_rates, out_rates
from lightning_offload.planning.problem import Bytes, Candidate, Problem
from lightning_offload.planning.residency import Actions, Residency, residency
from lightning_offload.planning.tiers import TierChoice, choose_tiers

_LOOKAHEAD = 64


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """When copies are made, for policies that say so themselves.

    Attributes:
        release: By swapped storage: tick of the op before which its device copy is released; -1, at its pack, for
            the others.
        prefetch: By swapped storage: ordinal of the unpack at which its copy back is issued; -1, on demand, for the
            others. One that comes before the device copy is released, or after its need, is on demand.
    """

    release: Mapping[int, int]
    prefetch: Mapping[int, int]


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
        prefetch: By swapped storage: ordinal of the unpack at which its copy back is issued; -1 on demand.
        tiers: By swapped storage: where it goes.
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
    host_peak_bytes: int
    disk_peak_bytes: int
    overflow_bytes: int


def simulate(
    problem: Problem,
    actions: Actions,
    device: DeviceSpec,
    *,
    limit_bytes: int | None = None,
    no_memo: frozenset[int] = frozenset(),
    overlap: bool = True,
    schedule: Schedule | None = None,
) -> Timeline:
    """Simulate a step.

    Args:
        problem: The step.
        actions: What happens to each candidate storage; those without an action are kept.
        device: Links, tiers and overheads.
        limit_bytes: Releases and prefetches are chosen so that memory stays below this where they can.
        no_memo: Recomputed storages that are not kept when they are replayed on the way to another.
        overlap: Whether copies may overlap compute; False is the floor policy, which waits for each.
        schedule: When to release and to prefetch; by default chosen for the limit.
    """
    if schedule is None and not overlap:
        schedule = Schedule(release={}, prefetch={})
    return _Simulation(problem, actions, device, no_memo).run(limit_bytes, schedule)


class _Simulation:
    def __init__(self, problem: Problem, actions: Actions, device: DeviceSpec, no_memo: frozenset[int]) -> None:
        self.problem = problem
        self.device = device
        self.needs: Residency = residency(problem, actions, no_memo)
        self.swapped = [problem.candidates[s] for s, action in actions.items() if action == "swap"]
        self.swapped.sort(key=lambda c: c.pack_tick)
        self.recomputed = [s for s, action in actions.items() if action == "recompute"]
        self.kept = [s for s in problem.candidates if s not in actions]
        seconds = problem.seconds.copy()
        for tick, replayed in self.needs.replay_seconds.items():
            seconds[tick] += replayed + device.overhead_seconds
        self.seconds = seconds
        self.starts: npt.NDArray[np.float64] = np.concatenate(([0.0], np.cumsum(seconds)))
        self.release: dict[int, int] = {}
        self.prefetch: dict[int, int] = {}
        away = {c.storage: self._away_seconds(c) for c in self.swapped} if device.host_memory_bytes is not None else {}
        self.stored: TierChoice = choose_tiers(problem, self.swapped, self.recomputed, away, device)
        self.memory = self._static_memory()

    def run(self, limit: int | None, schedule: Schedule | None) -> Timeline:
        if schedule is None:
            self._choose_releases(limit)
            self._choose_prefetches(limit)
        else:
            self._follow(schedule)
        seconds, stalls = self._time()
        peak = int(np.argmax(self.memory))
        return Timeline(
            memory=self.memory,
            peak_bytes=int(self.memory[peak]),
            peak_tick=peak,
            step_seconds=seconds,
            stall_seconds=stalls,
            release_tick=self.release,
            prefetch=self.prefetch,
            tiers=self.stored.tiers,
            host_peak_bytes=self.stored.host_peak_bytes,
            disk_peak_bytes=self.stored.disk_peak_bytes,
            overflow_bytes=self.stored.overflow_bytes,
        )

    def _away_seconds(self, candidate: Candidate) -> float:
        """From its pack to its first need, or to its end where it is never needed."""
        until = self.needs.needed_at.get(candidate.storage, candidate.release)
        return float(self.starts[until] - self.starts[candidate.pack_tick])

    # ---- memory

    def _static_memory(self) -> Bytes:
        """Memory with every swap released at its pack and brought back on demand."""
        problem, needs = self.problem, self.needs
        size = problem.graph.num_ticks + 2
        delta = np.zeros(size, dtype=np.int64)
        for s in self.kept:
            candidate = problem.candidates[s]
            _occupy(delta, candidate.death, needs.held_until[s], candidate.num_bytes)
        for s in (*self.recomputed, *(c.storage for c in self.swapped)):
            if s in needs.needed_at:
                _occupy(delta, needs.needed_at[s], needs.held_until[s], problem.candidates[s].num_bytes)
        memory = problem.base + np.cumsum(delta)[: size - 1]
        for tick, transient in needs.transient_bytes.items():
            memory[tick] += transient
        return memory

    def _follow(self, schedule: Schedule) -> None:
        """Release and prefetch as a schedule says."""
        for c in self.swapped:
            s, need = c.storage, self.needs.needed_at.get(c.storage, c.release)
            release = self.release[s] = min(schedule.release.get(s, -1), need)
            if release > c.death:
                self.memory[c.death : release] += c.num_bytes
            ordinal = schedule.prefetch.get(s, -1)
            tick = int(self.problem.unpack_ticks[ordinal]) if ordinal >= 0 else -1
            if s in self.needs.needed_at and max(c.death, release, 0) <= tick < need:
                self.memory[tick:need] += c.num_bytes
            else:
                ordinal = -1
            self.prefetch[s] = ordinal

    def _choose_releases(self, limit: int | None) -> None:
        """Release each device copy when its copy out has ended, earlier where memory is short."""
        lanes = Direction(out_rates(self.device))
        waiting: list[tuple[int, int, int]] = []
        for c in self.swapped:
            end = lanes.run(c.num_bytes, self.stored.tiers[c.storage], float(self.starts[c.pack_tick]))
            until = self._next_op_tick(int(np.searchsorted(self.starts, end)))
            first_need = self.needs.needed_at.get(c.storage, c.release)
            tight = self._last_op_tick(c.pack_tick, c.death)
            release = until if until < first_need else tight
            self.release[c.storage] = release
            if release > c.death:
                self.memory[c.death : release] += c.num_bytes
                waiting.append((c.death, release, c.storage))
        if limit is not None and waiting:
            self._release_earlier(waiting, limit)

    def _release_earlier(self, waiting: list[tuple[int, int, int]], limit: int) -> None:
        """Where memory exceeds the limit, wait for the oldest copies first."""
        first, last = min(w[0] for w in waiting), max(w[1] for w in waiting)
        over = np.flatnonzero(self.memory[first:last] > limit) + first
        for tick in over.tolist():
            for death, _, s in waiting:
                if self.memory[tick] <= limit:
                    break
                current = self.release[s]
                if death <= tick < current:
                    candidate = self.problem.candidates[s]
                    self.release[s] = self._last_op_tick(candidate.pack_tick, max(tick, death))
                    if self.release[s] > tick:
                        continue
                    self.memory[max(self.release[s], death) : current] -= candidate.num_bytes

    def _next_op_tick(self, tick: int) -> int:
        ops = self.problem.op_ticks
        i = int(np.searchsorted(ops, tick))
        return int(ops[i]) if i < len(ops) else self.problem.graph.num_ticks

    def _last_op_tick(self, after: int, until: int) -> int:
        """The last op in (after, until], before which a copy may be waited for; -1, at the pack, if there is none."""
        ops = self.problem.op_ticks
        i = int(np.searchsorted(ops, until, side="right")) - 1
        return int(ops[i]) if i >= 0 and ops[i] > after else -1

    def _choose_prefetches(self, limit: int | None) -> None:
        """Issue each copy back as late as hides it, as early as memory allows; last need first."""
        wanted = [(self.needs.needed_at[c.storage], c) for c in self.swapped if c.storage in self.needs.needed_at]
        deadlines = Deadlines(in_rates(self.device), self.device.overhead_seconds)
        for need, c in sorted(wanted, key=lambda pair: -pair[0]):
            issue_by = deadlines.issue_by(c.num_bytes, self.stored.tiers[c.storage], float(self.starts[need]))
            away_from = max(c.death, self.release[c.storage])
            self.prefetch[c.storage] = self._issue(need, issue_by, c.num_bytes, away_from, limit)

    def _issue(self, need: int, issue_by: float, num_bytes: int, away_from: int, limit: int | None) -> int:
        """Walk back from a need to the unpack at which its copy is issued, while memory allows; -1 for none."""
        ticks = self.problem.unpack_ticks
        ordinal = int(np.searchsorted(ticks, need)) - 1
        earliest = max(0, ordinal - _LOOKAHEAD)
        chosen, tick = -1, need
        while ordinal >= earliest and ticks[ordinal] >= away_from:
            before = int(ticks[ordinal])
            if limit is not None and int(self.memory[before:tick].max(initial=0)) + num_bytes > limit:
                break
            self.memory[before:tick] += num_bytes
            chosen, tick = ordinal, before
            if self.starts[before] <= issue_by:
                break
            ordinal -= 1
        return chosen

    # ---- time

    def _time(self) -> tuple[float, float]:
        """Seconds of the step, and of those the ones that compute waited for copies."""
        lanes, device, tiers = Lanes(self.device), self.device, self.stored.tiers
        packed, released, issued, needed = self._events()
        now, previous = 0.0, 0
        for tick in sorted({*packed, *released, *issued, *needed}):
            now += float(self.starts[tick] - self.starts[previous])
            previous = tick
            for s in packed.get(tick, ()):
                lanes.swap_out(s, self.problem.candidates[s].num_bytes, tiers[s], now)
            for s in released.get(tick, ()):
                now = lanes.wait(lanes.out_end[s], now)
            for s in (*issued.get(tick, ()), *needed.get(tick, ())):
                lanes.swap_in(s, self.problem.candidates[s].num_bytes, tiers[s], now)
            for s in needed.get(tick, ()):
                now = lanes.wait(lanes.in_end[s], now)
        now += float(self.starts[-1] - self.starts[previous])
        interference = max(0.0, lanes.copy_seconds - lanes.stall_seconds) * device.copy_interference
        return now + interference + 2 * len(self.swapped) * device.overhead_seconds, lanes.stall_seconds

    def _events(self) -> tuple[dict[int, list[int]], ...]:
        """Storages by tick of their copy out, release, issue of the copy back, and first need."""
        packed: dict[int, list[int]] = {}
        released: dict[int, list[int]] = {}
        issued: dict[int, list[int]] = {}
        needed: dict[int, list[int]] = {}
        for c in self.swapped:
            packed.setdefault(c.pack_tick, []).append(c.storage)
            release = self.release[c.storage]
            released.setdefault(release if release >= 0 else c.pack_tick, []).append(c.storage)
            if c.storage in self.needs.needed_at:
                needed.setdefault(self.needs.needed_at[c.storage], []).append(c.storage)
                ordinal = self.prefetch[c.storage]
                if ordinal >= 0:
                    issued.setdefault(int(self.problem.unpack_ticks[ordinal]), []).append(c.storage)
        return packed, released, issued, needed


def _occupy(delta: Bytes, begin: int, end: int, num_bytes: int) -> None:
    if begin < end:
        delta[begin] += num_bytes
        delta[end] -= num_bytes
