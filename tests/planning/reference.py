"""The step simulator written for the eye: slow, tick by tick, from the definitions.

What the fast one must agree with. Sets and lists of who is where at each tick take the place of flat arrays,
difference arrays, heaps and memoised maxima.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools

import numpy as np

from lightning_offload.graph import DeviceSpec
from lightning_offload.graph.host_layout import stored_bytes
from lightning_offload.graph.memory_plan import Action, Tier
from lightning_offload.planning.problem import Candidate, Problem
from lightning_offload.planning.simulator import Schedule, Timeline
from tests.planning.reference_backward import Backward, saved_behind


def reference_timeline(
    problem: Problem,
    actions: dict[int, Action],
    device: DeviceSpec,
    *,
    limit_bytes: int | None = None,
    no_memo: frozenset[int] = frozenset(),
    schedule: Schedule | None = None,
) -> Timeline:
    """What :func:`lightning_offload.planning.simulator.simulate` returns."""
    return _Step(problem, actions, device, no_memo).run(limit_bytes, schedule)


@dataclasses.dataclass
class _Lane:
    """One direction: when the link and the disk are free."""

    link_rate: float
    disk_rate: float
    is_linked: bool
    link_free: float = 0.0
    disk_free: float = 0.0

    def copy(self, num_bytes: int, tier: Tier, now: float, after: float = 0.0) -> float:
        if tier == "host":
            self.link_free = max(now, self.link_free, after) + num_bytes * (1 / self.link_rate)
            return self.link_free
        begin = max(now, self.disk_free, after)
        if self.is_linked:
            begin = max(begin, now, self.link_free)
            self.link_free = max(now, self.link_free) + num_bytes * (1 / self.link_rate)
        slower = min(self.link_rate, self.disk_rate) if self.is_linked else self.disk_rate
        self.disk_free = begin + num_bytes * (1 / slower)
        return self.disk_free


class _Step:
    def __init__(
        self, problem: Problem, actions: dict[int, Action], device: DeviceSpec, no_memo: frozenset[int]
    ) -> None:
        self.problem, self.actions, self.device = problem, actions, device
        self.backward = Backward(problem, actions, no_memo)
        self.swapped = sorted(
            (problem.candidates[s] for s in actions if actions[s] == "swap"), key=lambda c: c.pack_tick
        )
        self.always_kept = [
            s for s in problem.release if s not in problem.candidates and not problem.graph.storages[s].is_persistent
        ]
        seconds = [float(x) for x in problem.seconds]
        for tick, replayed in self.backward.seconds.items():
            seconds[tick] += replayed + device.overhead_seconds
        self.starts = [0.0, *itertools.accumulate(seconds)]
        self.release: dict[int, int] = {c.storage: -1 for c in self.swapped}
        self.prefetch: dict[int, int] = {}
        self.tiers, self.host_peak, self.disk_peak = self._choose_tiers()

    def run(self, limit: int | None, schedule: Schedule | None) -> Timeline:
        if schedule is not None:
            self._follow(schedule)
            return self._timeline()
        self._choose_releases(limit)
        self._fetch_last_need_first(limit)
        timeline = self._timeline()
        if timeline.stall_seconds <= 0.001 * timeline.step_seconds:
            return timeline
        self._fetch_in_order(limit)
        other = self._timeline()
        highest = limit if limit is not None else float("inf")
        if timeline.peak_bytes > highest >= other.peak_bytes:
            return other
        if other.peak_bytes > highest >= timeline.peak_bytes:
            return timeline
        return other if timeline.step_seconds - other.step_seconds > 1e-9 * timeline.step_seconds else timeline

    def _timeline(self) -> Timeline:
        memory = [self.bytes_at(tick) for tick in range(len(self.problem.base))]
        seconds, stall = self._time()
        room = self.device.host_memory_bytes
        return Timeline(
            memory=np.array(memory),
            peak_bytes=max(memory),
            peak_tick=memory.index(max(memory)),
            step_seconds=seconds,
            stall_seconds=stall,
            release_tick=dict(self.release),
            prefetch=dict(self.prefetch),
            tiers=self.tiers,
            out_seconds=self.gone,
            in_seconds=self.here,
            host_peak_bytes=self.host_peak,
            disk_peak_bytes=self.disk_peak,
            overflow_bytes=max(0, self.host_peak - room) if room is not None else 0,
        )

    def bytes_at(self, tick: int) -> int:
        """What is on the device at a tick, storage by storage."""
        total = int(self.problem.base[tick]) + self.backward.transient.get(tick, 0)
        total += sum(self.problem.graph.storages[s].num_bytes for s in self.always_kept if self._is_held(s, tick))
        return total + sum(c.num_bytes * self._num_copies(c, tick) for c in self.problem.candidates.values())

    def _is_held(self, s: int, tick: int) -> bool:
        """Whether only a recorded call holds a storage any more, which the base does not know."""
        dropped = max(self.problem.graph.storages[s].death, self.problem.release[s])
        return dropped <= tick < self.backward.held[s]

    def _num_copies(self, c: Candidate, tick: int) -> int:
        """How often a saved storage is there beside the program's own reference: 0 or 1, were it not for mistakes."""
        s, needed, held = c.storage, self.backward.needed.get(c.storage), self.backward.held[c.storage]
        if s not in self.actions:
            return int(c.death <= tick < held)
        is_back = needed is not None and needed <= tick < held
        is_leaving = self.actions[s] == "swap" and c.death <= tick < self.release[s]
        ordinal = self.prefetch.get(s, -1)
        is_fetched = ordinal >= 0 and needed is not None and self.problem.unpacks[ordinal].tick <= tick < needed
        return is_back + is_leaving + is_fetched

    def _first_need(self, c: Candidate) -> int:
        return self.backward.needed.get(c.storage, c.release)

    # ---- tiers

    def _choose_tiers(self) -> tuple[dict[int, Tier], int, int]:
        limit, order = self.device.host_memory_bytes, list(self.swapped)
        on_disk: list[Candidate] = []
        if limit is not None and self.device.has_disk:
            order.sort(key=lambda c: (self.starts[c.pack_tick] - self.starts[self._first_need(c)], c.storage))
            while self._stored_peak(order) > limit:
                on_disk.append(order.pop(0))
        tiers: dict[int, Tier] = {c.storage: "host" for c in order} | {c.storage: "disk" for c in on_disk}
        return tiers, self._stored_peak(order), self._stored_peak(on_disk)

    def _stored_peak(self, stored: list[Candidate]) -> int:
        ends = self._stored_until()
        return max(
            sum(stored_bytes(c.num_bytes) for c in stored if c.pack_tick <= tick < ends[c.storage])
            for tick in range(self.problem.graph.num_ticks + 1)
        )

    def _stored_until(self) -> dict[int, int]:
        """By saved storage: when nobody may read its copy any more: who is recomputed reads until it is dropped."""
        ends, before = dict(self.problem.release), dict[int, int]()
        while ends != before:
            before = dict(ends)
            for s in (s for s in self.actions if self.actions[s] == "recompute"):
                for read in saved_behind(self.problem, self.problem.candidates[s].value):
                    ends[read] = max(ends[read], ends[s])
        return ends

    # ---- copies

    def _follow(self, schedule: Schedule) -> None:
        for c in self.swapped:
            wished = schedule.release.get(c.storage, -1)
            until = self._first_need(c) if c.storage in self.backward.needed else max(c.release, c.death)
            self.release[c.storage] = release = min(wished, until) if wished >= c.pack_tick else -1
            ordinal = schedule.prefetch.get(c.storage, -1)
            tick = self.problem.unpacks[ordinal].tick if ordinal >= 0 else -1
            is_possible = c.storage in self.backward.needed and max(c.death, release, 0) <= tick < self._first_need(c)
            self.prefetch[c.storage] = ordinal if is_possible else -1

    def _choose_releases(self, limit: int | None) -> None:
        out = self._lane_out()
        for c in self.swapped:
            end = out.copy(c.num_bytes, self.tiers[c.storage], self.starts[c.pack_tick])
            begun = bisect.bisect_left(self.starts, end)
            until = min((op.tick for op in self.problem.graph.ops if op.tick >= begun), default=len(self.starts) - 2)
            need = self._first_need(c)
            late = self._last_op(c, c.death if limit is None else max(need, c.death))
            self.release[c.storage] = until if until < need else late
        over = [t for t in range(len(self.problem.base)) if limit is not None and self.bytes_at(t) > limit]
        for tick in over:
            for c in self.swapped:
                if self.bytes_at(tick) > limit and c.death <= tick < self.release[c.storage]:
                    self.release[c.storage] = self._last_op(c, tick)

    def _last_op(self, c: Candidate, until: int) -> int:
        return max((op.tick for op in self.problem.graph.ops if c.pack_tick < op.tick <= until), default=-1)

    def _fetch_last_need_first(self, limit: int | None) -> None:
        self.prefetch = {}
        for c, by in self._deadlines():
            self.prefetch[c.storage] = self._issue(c, by, limit, 0)

    def _fetch_in_order(self, limit: int | None) -> None:
        """The first need first, and never at an earlier tick than any copy that is needed before it."""
        self.prefetch, begun = {}, [0]
        deadlines = self._deadlines()
        for c, by in sorted(deadlines, key=lambda deadline: self._first_need(deadline[0])):
            self.prefetch[c.storage] = ordinal = self._issue(c, by, limit, max(begun))
            begun.append(self.problem.unpacks[ordinal].tick if ordinal >= 0 else self._first_need(c))

    def _deadlines(self) -> list[tuple[Candidate, float]]:
        """When each copy back must be issued to hide it and all that come after it; the last need first."""
        wanted = [c for c in self.swapped if c.storage in self.backward.needed]
        link_from = disk_from = float("inf")
        back = self._lane_back()
        found = []
        for c in sorted(wanted, key=lambda c: -self._first_need(c)):
            need, overhead = self._first_need(c), self._overhead(c)
            if self.tiers[c.storage] == "host":
                by = link_from = min(self.starts[need], link_from) - c.num_bytes * (1 / back.link_rate) - overhead
            else:
                slower = min(back.link_rate, back.disk_rate) if back.is_linked else back.disk_rate
                disk_from = min(self.starts[need], disk_from) - c.num_bytes * (1 / slower) - overhead
                if back.is_linked:
                    link_from = min(self.starts[need], link_from) - c.num_bytes * (1 / back.link_rate)
                    disk_from = min(disk_from, link_from)
                by = disk_from
            found.append((c, by))
        return found

    def _issue(self, c: Candidate, by: float, limit: int | None, not_before: int) -> int:
        """The latest unpack that is early enough; else the earliest from which on there is room."""
        chosen, need = -1, self._first_need(c)
        ordinals = [i for i, unpack in enumerate(self.problem.unpacks) if unpack.tick < need]
        for ordinal in reversed(ordinals):
            tick = self.problem.unpacks[ordinal].tick
            has_room = limit is None or all(self.bytes_at(t) + c.num_bytes <= limit for t in range(tick, need))
            if tick < max(c.death, self.release[c.storage], not_before) or not has_room:
                break
            chosen = ordinal
            if self.starts[tick] <= by:
                break
        return chosen

    # ---- time

    def _lane_out(self) -> _Lane:
        d = self.device
        return _Lane(d.d2h_bytes_per_second, d.disk_write_bytes_per_second, d.kind != "cpu")

    def _lane_back(self) -> _Lane:
        d = self.device
        return _Lane(d.h2d_bytes_per_second, d.disk_read_bytes_per_second, d.kind != "cpu")

    def _time(self) -> tuple[float, float]:
        """Tick by tick: copies out begin, releases wait, copies back begin, needs wait, then work is done."""
        out, back, needed = self._lane_out(), self._lane_back(), self.backward.needed
        self.gone = gone = dict[int, float]()
        self.here = here = dict[int, float]()
        now = stalled = copied = 0.0
        for tick in range(len(self.problem.base)):
            for c in (c for c in self.swapped if c.pack_tick == tick):
                gone[c.storage] = out.copy(c.num_bytes, self.tiers[c.storage], now)
                copied += c.num_bytes / out.link_rate
            for c in self.swapped:
                release = self.release[c.storage] if self.release[c.storage] >= 0 else c.pack_tick
                if release == tick:
                    stalled += max(0.0, gone[c.storage] - now)
                    now = max(now, gone[c.storage])
            issued = [c for c in reversed(self.swapped) if self._issued_at(c) == tick]
            issued.sort(key=lambda c: needed[c.storage])
            arriving = [c for c in self.swapped if needed.get(c.storage) == tick]
            for c in (*issued, *arriving):
                if c.storage not in here:
                    here[c.storage] = back.copy(c.num_bytes, self.tiers[c.storage], now, gone[c.storage])
                    copied += c.num_bytes / back.link_rate
            for c in arriving:
                stalled += max(0.0, here[c.storage] - now)
                now = max(now, here[c.storage])
            now += self.starts[tick + 1] - self.starts[tick]
        slowed = max(0.0, copied - stalled) * self.device.copy_interference
        return now + slowed + 2 * sum(map(self._overhead, self.swapped)), stalled

    def _overhead(self, c: Candidate) -> float:
        d, most = self.device, self.device.handover_bytes
        if most is not None and c.num_bytes <= most:
            return d.overhead_seconds + c.num_bytes / d.d2h_bytes_per_second * (1 - d.copy_interference)
        return d.overhead_seconds + d.handover_seconds * (most is not None)

    def _issued_at(self, c: Candidate) -> int:
        ordinal = self.prefetch.get(c.storage, -1)
        return self.problem.unpacks[ordinal].tick if ordinal >= 0 else -1
