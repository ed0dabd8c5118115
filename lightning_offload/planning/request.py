"""Turns a choice of actions into a memory plan, with its predictions and its floor; shared by all policies."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from lightning_offload.errors import BudgetInfeasibleError
from lightning_offload.graph.device_spec import DeviceSpec
from lightning_offload.graph.memory_plan import AT_PACK, Action, Decision, MemoryPlan
from lightning_offload.graph.step_graph import Op
from lightning_offload.planning.floor import Floor, find_floor
from lightning_offload.planning.logits import chunked_floor
from lightning_offload.planning.problem import Problem
from lightning_offload.planning.regions import largest_region
from lightning_offload.planning.relaxation import Relaxation, bound_of_action, relax
from lightning_offload.planning.simulator import Actions, Simulator, Timeline, simulate
from lightning_offload.units import format_budget_exactly, format_bytes


@dataclasses.dataclass(frozen=True)
class PlanRequest:
    """What every policy is given, and what several of them ask of it.

    Attributes:
        problem: The step.
        device: Where it runs.
        budget_bytes: Peak of live device bytes allowed, None for no limit.
        seconds: When to stop searching, for a policy that does; None to end by itself.
        seed: Of what such a policy does at random.
        is_provisional: Whether the plan is soon made again, with better figures, so that little effort is enough.
        is_hasty: Whether not even the lower bound is worth its time.
        max_prefixes: How many prefixes of its order a published policy tries at a time; None for what the step allows.
    """

    problem: Problem
    device: DeviceSpec
    budget_bytes: int | None
    seconds: float | None = None
    seed: int = 0
    is_provisional: bool = False
    is_hasty: bool = False
    max_prefixes: int | None = None

    def trying(self, max_prefixes: int) -> PlanRequest:
        """The same request for policies that try so many prefixes at a time; what was found of the step is shared."""
        copied = copy.copy(self)
        object.__setattr__(copied, "max_prefixes", max_prefixes)
        return copied

    @functools.cached_property
    def plain(self) -> Timeline:
        """The step with everything kept."""
        return simulate(self.problem, {}, self.device)

    @functools.cached_property
    def simulator(self) -> Simulator:
        """Simulates the step within the budget."""
        return Simulator(self.problem, self.device, self.budget_bytes)

    @functools.cached_property
    def relaxed(self) -> Relaxation:
        """The relaxed planning problem: a bound on the step time, and where good plans lie."""
        return relax(self.problem, self.device, self.budget_bytes, seconds=self.seconds)

    @property
    def bound_seconds(self) -> float:
        """Lower bound on the duration of any plan within the budget."""
        return self.plain.step_seconds if self.is_hasty else self.relaxed.seconds

    @functools.cached_property
    def step_bytes(self) -> int:
        """What the plain step's peak has on top of what was there before it, at least one byte."""
        return max(1, self.plain.peak_bytes - self.problem.graph.persistent_bytes)

    def bound_of(self, action: Action) -> float:
        """Lower bound on the duration of any plan within the budget that takes this action alone; 0 without one."""
        if self.budget_bytes is None or self.is_hasty:
            return 0.0
        return bound_of_action(self.problem, self.device, self.plain, self.budget_bytes, action)

    @functools.cached_property
    def lowest(self) -> Floor:
        """The choice with the smallest peak that can be promised."""
        return find_floor(self.problem, self.device, self.plain)

    @property
    def floor_actions(self) -> dict[int, Action]:
        """What to do for the smallest peak, waiting for each copy."""
        return self.lowest.actions

    @property
    def floor(self) -> Timeline:
        """The step under :attr:`floor_actions`: the smallest peak there is."""
        return self.lowest.timeline

    @property
    def floor_op(self) -> str:
        """The op whose working set sets the floor, with its module."""
        op = self.problem.graph.op_at(self.floor.peak_tick)
        if op is None:
            return "the state that is there before the step"
        return describe(op)

    def require_feasible(self) -> None:
        """Raise where no plan can meet the budget.

        Raises:
            BudgetInfeasibleError: The budget is below the floor.
        """
        if self.budget_bytes is not None and self.budget_bytes < self.floor.peak_bytes:
            raise self.infeasible(self.floor.peak_bytes, self.floor_op)

    def infeasible(self, floor_bytes: int, op: str, policy: str = "") -> BudgetInfeasibleError:
        """The error for a budget below a floor.

        Args:
            floor_bytes: The smallest budget that works.
            op: What sets it.
            policy: The policy whose floor it is; "" for the smallest of all.
        """
        assert self.budget_bytes is not None
        under = f" under policy {policy!r}" if policy else ""
        fixes = ["raise the budget", "lower the batch size"]
        if self.lowest.is_host_short:
            assert self.device.host_memory_bytes is not None
            fixes.append(f"raise the host budget ({format_bytes(self.device.host_memory_bytes)}) or allow a disk tier")
        fixes += ["use policy='auto'"] if policy else []
        return BudgetInfeasibleError(
            f"budget {format_budget_exactly(self.budget_bytes)} is infeasible{under}: the smallest "
            f"feasible budget is {format_bytes(floor_bytes)} ({floor_bytes} bytes), set by {op}; "
            + ", ".join(fixes[:-1])
            + f"{',' if len(fixes) > 2 else ''} or {fixes[-1]}"
            + (self._chunks + self._regions if not policy else ""),
            budget_bytes=self.budget_bytes,
            floor_bytes=floor_bytes,
            op=op,
        )

    @functools.cached_property
    def _chunks(self) -> str:
        """What a loss in chunks would make of the floor; nothing where logits do not set it."""
        lower = chunked_floor(self.problem, self.device, self.lowest)
        if lower is None:
            return ""
        return (
            f"; {lower.logits.name} set it: chunked_loss=True, or lightning_offload.chunked_linear_cross_entropy, with "
            f"{lower.num_chunks} chunks is predicted to need {format_bytes(lower.floor.timeline.peak_bytes)}"
        )

    @functools.cached_property
    def _regions(self) -> str:
        """That a region is too large for its floor to be low; nothing where none is."""
        region = largest_region(self.problem.requested)
        return f"; {region.advice}" if region is not None else ""


def describe(op: Op) -> str:
    """An op for messages: its name, its module where that is known, and its phase."""
    where = f" in `{op.module}`" if op.module else ""
    return f"{op.name}{where} ({op.phase})"


def build_plan(
    request: PlanRequest,
    policy: str,
    actions: Actions,
    timeline: Timeline,
    no_memo: frozenset[int] = frozenset(),
) -> MemoryPlan:
    """Write a simulated choice down as a plan."""
    return MemoryPlan(
        graph_digest=request.problem.graph.digest(),
        policy=policy,
        budget_bytes=request.budget_bytes,
        decisions=decisions_of(request.problem, actions, timeline, no_memo),
        predicted_peak_bytes=timeline.peak_bytes,
        predicted_step_seconds=timeline.step_seconds,
        plain_peak_bytes=request.plain.peak_bytes,
        plain_step_seconds=request.plain.step_seconds,
        floor_bytes=request.floor.peak_bytes,
        floor_op=request.floor_op,
        bound_seconds=request.bound_seconds,
        predicted_stall_seconds=timeline.stall_seconds,
        predicted_host_bytes=timeline.host_peak_bytes,
        predicted_disk_bytes=timeline.disk_peak_bytes,
    )


def decisions_of(
    problem: Problem, actions: Actions, timeline: Timeline, no_memo: frozenset[int]
) -> tuple[Decision, ...]:
    """A simulated choice as a plan's decisions; ``no_memo`` is what it was simulated with."""
    turn = {s: i for i, s in enumerate(timeline.prefetch)}  # copies back at one unpack go in the plan's order
    ordered = sorted(actions.items(), key=lambda item: (turn.get(item[0], -1), item[0]))
    ticks = np.fromiter((timeline.release_tick.get(s, -1) for s, _ in ordered), dtype=np.int64, count=len(ordered))
    release_ops = np.where(ticks < 0, AT_PACK, np.searchsorted(problem.op_ticks, ticks)).tolist()
    return tuple(
        Decision(
            storage=s,
            action=action,
            tier=timeline.tiers.get(s, "host"),
            release_op=release_op,
            prefetch_unpack=timeline.prefetch.get(s, -1),
            memo=s not in no_memo,
        )
        for (s, action), release_op in zip(ordered, release_ops, strict=True)
    )


def choice_of(decisions: Sequence[Decision]) -> tuple[dict[int, Action], frozenset[int]]:
    """What decisions do beside keeping, by storage, and the storages that are not memoised."""
    actions: dict[int, Action] = {d.storage: d.action for d in decisions if d.action != "keep"}
    return actions, frozenset(d.storage for d in decisions if not d.memo)
