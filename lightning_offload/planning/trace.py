"""A step under a plan as plain data: when each tick begins, memory, and what each lane does when.

The clock is that of :mod:`~lightning_offload.planning.simulator`: memory, releases, prefetches and the ends of copies
are the simulator's own, and this module writes down where each span begins and ends. What the simulator adds to a
step as a whole, the compute that copies slow down and the overhead of swaps, has no place within it: it is one span
of kind "slowdown" at the end.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from lightning_offload.errors import PlanError
from lightning_offload.graph.device_spec import DeviceSpec
from lightning_offload.graph.memory_plan import AT_PACK, Action, Decision, MemoryPlan, Tier
from lightning_offload.graph.step_graph import Phase, StepGraph
from lightning_offload.planning.kernels.clock import CLOCK_NOISE
from lightning_offload.planning.links import Rates, in_rates, out_rates
from lightning_offload.planning.problem import Bytes, Problem
from lightning_offload.planning.request import choice_of
from lightning_offload.planning.simulator import Schedule, Timeline, residency, simulate

Lane = Literal["compute", "d2h", "h2d", "disk_write", "disk_read"]
SpanKind = Literal["op", "replay", "stall", "copy", "slowdown"]
Seconds = npt.NDArray[np.float64]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """What a lane does for a while.

    Attributes:
        lane: Where; spans of one lane do not overlap.
        kind: An op, the replays for one unpack, compute that waits for a copy, a copy, or the slow-down by copies.
        start_seconds: From the beginning of the step.
        end_seconds: The same.
        name: The op, of a replay the one whose result was asked for, of a copy and a stall the one that made what
            is copied.
        module: Its module, of a copy and a stall the one that saved what is copied; "" where none is known.
        phase: Forward or backward.
        tick: At which it was issued.
        storage: Index of what is copied, waited for or asked for; -1 for ops.
        num_bytes: Its size; 0 for ops.
        tier: Where a copy goes to or comes from; a copy between device and disk has a span on the link too.
    """

    lane: Lane
    kind: SpanKind
    start_seconds: float
    end_seconds: float
    name: str
    module: str
    phase: Phase
    tick: int
    storage: int = -1
    num_bytes: int = 0
    tier: Tier = "host"

    @property
    def seconds(self) -> float:
        """Duration."""
        return self.end_seconds - self.start_seconds


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepTrace:
    """A step under a plan.

    Attributes:
        tick_seconds: When each tick begins: after waiting for copies out, before waiting for copies back.
        memory: Live device bytes at each tick.
        spans: Of all lanes, by start.
        step_seconds: Duration.
        stall_seconds: The part of it in which compute waits for copies.
        slowdown_seconds: The part of it that copies cost beside stalls: their interference and overhead.
        backward_seconds: When backward begins; the end of the step where there is none.
        backward_tick: The tick of that.
    """

    tick_seconds: Seconds
    memory: Bytes
    spans: tuple[Span, ...]
    step_seconds: float
    stall_seconds: float
    slowdown_seconds: float
    backward_seconds: float
    backward_tick: int

    @property
    def peak_bytes(self) -> int:
        """The maximum of memory."""
        return int(self.memory.max())

    def of(self, lane: Lane) -> tuple[Span, ...]:
        """The spans of a lane."""
        return tuple(span for span in self.spans if span.lane == lane)


def follow(step: StepGraph | Problem, plan: MemoryPlan | None, device: DeviceSpec) -> StepTrace:
    """Execute a plan on the simulated clock.

    Args:
        step: The step, or the problem made of it.
        plan: What to do; None to keep everything.
        device: Where.

    Raises:
        PlanError: The plan is one for another step, or has a decision that cannot be carried out.
    """
    problem = step if isinstance(step, Problem) else Problem(step)
    decisions = plan.decisions if plan is not None else ()
    if plan is not None:
        plan.check(problem.graph)
    tiers = {d.storage: d.tier for d in decisions if d.action == "swap"}
    if not device.has_disk and "disk" in tiers.values():
        raise PlanError(f"the plan swaps to disk, and device {device.name!r} has none; give disk_*_bytes_per_second")
    simulated = simulate_plan(problem, decisions, device)
    return _Walk(problem, device, tiers, simulated).run(*choice_of(decisions))


def simulate_plan(problem: Problem, decisions: Sequence[Decision], device: DeviceSpec) -> Timeline:
    """Simulate a step under decisions, with each copy at the time that they say.

    Raises:
        PlanError: A decision cannot be carried out.
    """
    actions, no_memo = choice_of(decisions)
    _check(problem, actions)
    swaps = [d for d in decisions if d.action == "swap"]
    schedule = Schedule(
        release={d.storage: release_tick(problem, d.release_op) for d in swaps},
        prefetch={d.storage: d.prefetch_unpack for d in swaps},
        tiers={d.storage: d.tier for d in swaps},
    )
    return simulate(problem, actions, device, no_memo=no_memo, schedule=schedule)


def release_tick(problem: Problem, release_op: int) -> int:
    """The tick of a decision's ``release_op``; -1 for at its pack, ``num_ticks`` for after the last op."""
    if release_op == AT_PACK:
        return -1
    return int(problem.op_ticks[release_op]) if release_op < len(problem.op_ticks) else problem.graph.num_ticks


def _check(problem: Problem, actions: dict[int, Action]) -> None:
    for storage, action in actions.items():
        candidate = problem.candidates.get(storage)
        if candidate is None or (action == "recompute" and not candidate.can_recompute):
            wish = {"swap": "swapped", "recompute": "recomputed", "keep": "kept"}[action]
            raise PlanError(f"storage {storage} cannot be {wish}: keep it, or plan again with policy='auto'")


class _Walk:
    """One pass over the events of a simulated step; waits move all that follows."""

    def __init__(self, problem: Problem, device: DeviceSpec, tiers: dict[int, Tier], simulated: Timeline) -> None:
        self._problem, self._device, self._tiers, self._simulated = problem, device, tiers, simulated
        self._links = {"out": _LinkClock(out_rates(device)), "in": _LinkClock(in_rates(device))}
        self._spans: list[Span] = []
        self._back: set[int] = set()
        self._backward_tick = next((op.tick for op in problem.graph.ops if op.phase == "backward"), -1)
        if problem.unpacks and self._backward_tick >= 0:
            self._backward_tick = min(self._backward_tick, problem.unpacks[0].tick)
        if self._backward_tick < 0:
            self._backward_tick = problem.graph.num_ticks

    def run(self, actions: dict[int, Action], no_memo: frozenset[int]) -> StepTrace:
        """Walk the step."""
        needs = residency(self._problem, actions, no_memo)
        overhead = self._device.replay_overhead
        seconds = self._problem.seconds.copy()
        for tick, replayed in needs.replay_seconds.items():
            seconds[tick] += replayed + overhead
        starts: Seconds = np.concatenate(([0.0], np.cumsum(seconds)))
        delays: Seconds = np.zeros(len(starts))
        waits: dict[int, float] = {}
        late = 0.0
        events = self._events(needs.needed_at)
        for tick in sorted(events):
            event, now = events[tick], float(starts[tick]) + late
            for s in event.packed:
                self._copy("out", s, tick, now, self._simulated.out_seconds[s])
            going_on = self._wait(event.released, self._simulated.out_seconds, tick, now)
            for s in (*event.issued, *event.needed):
                self._swap_in(s, tick, going_on)
            done = self._wait(event.needed, self._simulated.in_seconds, tick, going_on)
            waits[tick] = done - going_on
            delays[tick] += going_on - now
            delays[tick + 1] += done - going_on
            late += done - now
        tick_seconds: Seconds = (starts + np.cumsum(delays))[:-1]
        self._compute(tick_seconds, seconds, waits, needs.replay_seconds)
        return self._finish(tick_seconds, float(starts[-1]) + late)

    def _events(self, needed_at: dict[int, int]) -> dict[int, _Event]:
        """What happens at ticks, in the order of the packs; copies back in the order of their needs."""
        events: dict[int, _Event] = {}

        def at(tick: int) -> _Event:
            return events.setdefault(tick, _Event())

        for s in sorted(self._tiers, key=lambda s: self._problem.candidates[s].pack_tick):
            packed, release = self._problem.candidates[s].pack_tick, self._simulated.release_tick[s]
            at(packed).packed.append(s)
            at(release if release >= 0 else packed).released.append(s)
            if s in needed_at:
                at(needed_at[s]).needed.append(s)
                ordinal = self._simulated.prefetch[s]
                if ordinal >= 0:
                    at(int(self._problem.unpack_ticks[ordinal])).issued.insert(0, s)
        for event in events.values():
            event.issued.sort(key=lambda s: needed_at[s])
        return events

    def _swap_in(self, storage: int, tick: int, now: float) -> None:
        if storage not in self._back:
            self._back.add(storage)
            self._copy("in", storage, tick, now, self._simulated.in_seconds[storage])

    def _copy(self, direction: Literal["out", "in"], storage: int, tick: int, now: float, end: float) -> None:
        link_lane: Lane = "d2h" if direction == "out" else "h2d"
        disk_lane: Lane = "disk_write" if direction == "out" else "disk_read"
        link, tier = self._links[direction], self._tiers[storage]
        num_bytes = self._problem.graph.storages[storage].num_bytes
        if tier == "disk":
            self._about(storage, disk_lane, "copy", end - num_bytes * link.rates.disk, end, tick)
        if tier == "host" or link.rates.link_under_disk:
            start, end = link.take(num_bytes, tier, now, end)
            self._about(storage, link_lane, "copy", start, end, tick)

    def _wait(self, storages: Iterable[int], ends: Mapping[int, float], tick: int, now: float) -> float:
        """Compute waits for copies, one after another; the time at which it goes on."""
        for s in storages:
            if ends[s] - now > CLOCK_NOISE:
                self._about(s, "compute", "stall", now, ends[s], tick)
            now = max(now, ends[s])
        return now

    def _about(self, storage: int, lane: Lane, kind: SpanKind, start: float, end: float, tick: int) -> None:
        """Write down a span about a storage."""
        candidate = self._problem.candidates[storage]
        producer = self._problem.graph.values[candidate.value].producer
        self._spans.append(
            Span(
                lane=lane,
                kind=kind,
                start_seconds=start,
                end_seconds=end,
                name=self._problem.graph.ops[producer].name if producer >= 0 else "input",
                module=candidate.module,
                phase="backward" if tick >= self._backward_tick else "forward",
                tick=tick,
                storage=storage,
                num_bytes=candidate.num_bytes,
                tier=self._tiers.get(storage, "host"),
            )
        )

    def _compute(
        self, tick_seconds: Seconds, seconds: Seconds, waits: dict[int, float], replays: dict[int, float]
    ) -> None:
        for op in self._problem.graph.ops:
            start = float(tick_seconds[op.tick]) + waits.get(op.tick, 0.0)
            self._spans.append(
                Span(
                    lane="compute", kind="op", start_seconds=start, end_seconds=start + op.seconds,
                    name=op.name, module=op.module, phase=op.phase, tick=op.tick,
                )
            )  # fmt: skip
        for unpack in self._problem.unpacks:
            if unpack.tick in replays:
                start = float(tick_seconds[unpack.tick]) + waits.get(unpack.tick, 0.0)
                end = start + float(seconds[unpack.tick])
                self._about(unpack.storage, "compute", "replay", start, end, unpack.tick)

    def _finish(self, tick_seconds: Seconds, end: float) -> StepTrace:
        graph, simulated = self._problem.graph, self._simulated
        has_slowdown = self._tiers and (self._device.copy_interference or self._device.overhead_seconds)
        slowdown = max(0.0, simulated.step_seconds - end) if has_slowdown else 0.0
        if slowdown:
            self._spans.append(
                Span(
                    lane="compute", kind="slowdown", start_seconds=end, end_seconds=end + slowdown,
                    name="slow-down by copies", module="", phase="backward", tick=graph.num_ticks,
                )
            )  # fmt: skip
        return StepTrace(
            tick_seconds=tick_seconds,
            memory=simulated.memory,
            spans=tuple(sorted(self._spans, key=lambda span: (span.start_seconds, span.end_seconds))),
            step_seconds=end + slowdown,
            stall_seconds=simulated.stall_seconds,
            slowdown_seconds=slowdown,
            backward_seconds=float(tick_seconds[self._backward_tick]),
            backward_tick=self._backward_tick,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class _Event:
    """Storages by what happens to them at a tick."""

    packed: list[int] = dataclasses.field(default_factory=list)
    released: list[int] = dataclasses.field(default_factory=list)
    issued: list[int] = dataclasses.field(default_factory=list)
    needed: list[int] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(slots=True)
class _LinkClock:
    """When the link of a direction is busy."""

    rates: Rates
    free: float = 0.0

    def take(self, num_bytes: int, tier: Tier, now: float, end: float) -> tuple[float, float]:
        """The link's part of a copy: all of one to the host, which ends at ``end``, a share of one to disk."""
        if tier == "host":
            start = max(self.free, end - num_bytes * self.rates.link)
        else:
            start = max(self.free, now)
            end = start + num_bytes * self.rates.link_under_disk
        self.free = end
        return start, end
