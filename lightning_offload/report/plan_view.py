"""What is shown of a plan, on a page and in a terminal, by a report and by the commands.

Figures of the plan itself, what it does with each storage that autograd saved, the plan followed on the simulated
clock, what was measured under it, and what other policies make of the step.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, get_args

from lightning_offload.errors import BudgetInfeasibleError, PlanError
from lightning_offload.graph.device_spec import DeviceSpec
from lightning_offload.graph.memory_plan import Action, Decision, MemoryPlan
from lightning_offload.graph.step_graph import Save, StepGraph
from lightning_offload.planning.planner import POLICIES, plan
from lightning_offload.planning.problem import Problem
from lightning_offload.planning.trace import StepTrace, follow
from lightning_offload.report.scale import format_share
from lightning_offload.units import format_budget

__all__ = [
    "MeasuredStep", "PlanView", "PolicyOutcome", "Stored", "action_bytes", "bytes_by_action", "compare_policies",
    "costliest", "gap_to_bound", "module_totals", "overhead", "predictions", "stored_in", "verdict", "view_plan",
]  # fmt: skip


def overhead(made: MemoryPlan) -> float:
    """By what share a planned step takes longer than a plain one."""
    return made.predicted_step_seconds / made.plain_step_seconds - 1 if made.plain_step_seconds else 0.0


def gap_to_bound(made: MemoryPlan) -> float:
    """By what share a planned step takes longer than the bound that no plan can beat."""
    return made.predicted_step_seconds / made.bound_seconds - 1 if made.bound_seconds else 0.0


def verdict(made: MemoryPlan, typed: str | None = None) -> str:
    """Whether and how a step fits; its budget as it was typed, where that is known."""
    if made.budget_bytes is None:
        return "no budget"
    budget = format_budget(made.budget_bytes, typed)
    if made.predicted_peak_bytes > made.budget_bytes:
        return f"does not fit {budget}"
    if not made.decisions:
        return f"fits {budget} as it is"
    return f"fits {budget} at {format_share(overhead(made))} of step time"


def predictions(made: MemoryPlan) -> dict[str, Any]:
    """All that a plan says of itself, its decisions aside, with stable keys."""
    return {
        "policy": made.policy,
        "graph_digest": made.graph_digest,
        "budget_bytes": made.budget_bytes,
        "fits_plainly": made.budget_bytes is None or made.plain_peak_bytes <= made.budget_bytes,
        "plain_peak_bytes": made.plain_peak_bytes,
        "predicted_peak_bytes": made.predicted_peak_bytes,
        "floor_bytes": made.floor_bytes,
        "floor_op": made.floor_op,
        "plain_step_seconds": made.plain_step_seconds,
        "predicted_step_seconds": made.predicted_step_seconds,
        "predicted_stall_seconds": made.predicted_stall_seconds,
        "bound_seconds": made.bound_seconds,
        "overhead": overhead(made),
        "gap_to_bound": gap_to_bound(made),
        "predicted_host_bytes": made.predicted_host_bytes,
        "predicted_disk_bytes": made.predicted_disk_bytes,
    }


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep:
    """What was measured of steps that ran under the plan; None where a figure is not known.

    Attributes:
        step_seconds: Duration.
        stall_seconds: Time in it that compute waited for copies.
        peak_bytes: Peak of live device bytes.
        forward_peak_bytes: The same in forward.
        backward_peak_bytes: The same in backward.
        optimizer_peak_bytes: The same in the optimizer's step.
        host_peak_bytes: Most bytes on the host that held swapped tensors at once.
        disk_peak_bytes: The same for the disk.
        engine: What the steps ran in: "native", or "python: " and why.
    """

    step_seconds: float | None = None
    stall_seconds: float | None = None
    peak_bytes: int | None = None
    forward_peak_bytes: int | None = None
    backward_peak_bytes: int | None = None
    optimizer_peak_bytes: int | None = None
    host_peak_bytes: int | None = None
    disk_peak_bytes: int | None = None
    engine: str | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PolicyOutcome:
    """What a policy makes of a step within a budget.

    Attributes:
        policy: Its name.
        step_seconds: Predicted duration, None where it is infeasible.
        plain_step_seconds: Predicted duration with everything kept, None where it is infeasible.
        peak_bytes: Predicted peak, None where it is infeasible.
        floor_bytes: The smallest budget that it can meet, where it is infeasible; of auto always.
        stall_seconds: Time in the step that compute waits for copies; None where that is not known.
        swap_bytes: Saved bytes that it swaps; None where that is not known.
        recompute_bytes: Saved bytes that it recomputes; None where that is not known.
    """

    policy: str
    step_seconds: float | None = None
    plain_step_seconds: float | None = None
    peak_bytes: int | None = None
    floor_bytes: int | None = None
    stall_seconds: float | None = None
    swap_bytes: int | None = None
    recompute_bytes: int | None = None

    @property
    def traffic_bytes(self) -> int | None:
        """Bytes over the link in a step, both ways; None where that is not known."""
        return None if self.swap_bytes is None else 2 * self.swap_bytes

    @property
    def overhead(self) -> float | None:
        """Share by which the step is longer than with everything kept; None where that is not known."""
        if self.step_seconds is None or not self.plain_step_seconds:
            return None
        return self.step_seconds / self.plain_step_seconds - 1


def compare_policies(
    graph: StepGraph,
    device: DeviceSpec,
    budget_bytes: int | None,
    *,
    policies: Iterable[str] | None = None,
    keep: frozenset[int] = frozenset(),
    tell: Callable[[str], object] = lambda _: None,
) -> tuple[PolicyOutcome, ...]:
    """Plan a step under several policies.

    Args:
        graph: The recorded step.
        device: Where it runs.
        budget_bytes: The budget of each, None for no limit.
        policies: Their names; by default all there are.
        keep: Storages that must stay on the device.
        tell: Called with each policy's name before it plans.

    Raises:
        PolicyError: There is no policy of one of the names.
    """
    outcomes = []
    for name in POLICIES if policies is None else policies:
        tell(name)
        try:
            made = plan(graph, device, budget_bytes, policy=name, keep=keep)
        except BudgetInfeasibleError as error:
            outcomes.append(PolicyOutcome(policy=name, floor_bytes=error.floor_bytes))
            continue
        sizes = bytes_by_action(stored_in(graph, made))
        outcomes.append(
            PolicyOutcome(
                policy=made.policy,
                step_seconds=made.predicted_step_seconds,
                plain_step_seconds=made.plain_step_seconds,
                peak_bytes=made.predicted_peak_bytes,
                floor_bytes=made.floor_bytes if made.policy == "auto" else None,
                stall_seconds=made.predicted_stall_seconds,
                swap_bytes=sizes["swap"],
                recompute_bytes=sizes["recompute"],
            )
        )
    return tuple(outcomes)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A saved storage, persistent ones aside.

    Attributes:
        storage: Index in the graph.
        num_bytes: Size.
        action: What the plan does with it.
        decision: Its decision, None where it has none.
        module: Who saved it first.
        op: The op that made it.
        pack_tick: When it was first saved.
        release_tick: When autograd dropped it.
        idle_seconds: Plain compute between its first save and the first time that it is needed again.
    """

    storage: int
    num_bytes: int
    action: Action
    decision: Decision | None
    module: str
    op: str
    pack_tick: int
    release_tick: int
    idle_seconds: float = 0.0

    @property
    def tier(self) -> str | None:
        """Where it is swapped to; None unless it is."""
        return self.decision.tier if self.decision is not None and self.action == "swap" else None

    @property
    def weight(self) -> float:
        """Byte-seconds of device memory that keeping it costs."""
        return self.num_bytes * self.idle_seconds

    def state_dict(self) -> dict[str, Any]:
        """What commands print of it as JSON."""
        names = ("storage", "module", "op", "num_bytes", "idle_seconds", "action", "tier")
        return {name: getattr(self, name) for name in names}


def stored_in(graph: StepGraph, made: MemoryPlan) -> tuple[Stored, ...]:
    """What a plan does with each saved storage that did not exist before the step, in the order of first packs."""
    decisions = {decision.storage: decision for decision in made.decisions}
    clock = _PlainClock(graph)
    saves: dict[int, list[Save]] = {}
    for save in sorted(graph.saves, key=lambda save: save.pack_tick):
        saves.setdefault(graph.values[save.value].storage, []).append(save)
    return tuple(
        _stored(graph, storage, group, decisions.get(storage), clock)
        for storage, group in saves.items()
        if not graph.storages[storage].is_persistent
    )


def costliest(stored: Iterable[Stored]) -> list[Stored]:
    """The same, those first that cost most to keep."""
    return sorted(stored, key=lambda each: (-each.weight, -each.num_bytes, each.storage))


def bytes_by_action(stored: Iterable[Stored]) -> dict[Action, int]:
    """Saved bytes that are kept, swapped and recomputed."""
    sizes: dict[Action, int] = dict.fromkeys(get_args(Action), 0)
    for each in stored:
        sizes[each.action] += each.num_bytes
    return sizes


def action_bytes(stored: Iterable[Stored]) -> dict[str, int]:
    """The same, with the keys that they have in JSON."""
    return {f"{action}_bytes": num_bytes for action, num_bytes in bytes_by_action(stored).items()}


def module_totals(stored: Iterable[Stored]) -> list[dict[str, Any]]:
    """The same of each module, in the order in which modules first saved."""
    groups: dict[str, list[Stored]] = {}
    for each in sorted(stored, key=lambda each: each.storage):
        groups.setdefault(each.module, []).append(each)
    return [{"module": module, **action_bytes(group)} for module, group in groups.items()]


class _PlainClock:
    """Plain compute time at a tick."""

    def __init__(self, graph: StepGraph) -> None:
        self._ticks = [op.tick for op in graph.ops]
        self._until = [0.0, *itertools.accumulate(op.seconds for op in graph.ops)]

    def at(self, tick: int) -> float:
        return self._until[bisect.bisect_left(self._ticks, tick)]


def _stored(graph: StepGraph, storage: int, group: list[Save], decision: Decision | None, clock: _PlainClock) -> Stored:
    first = group[0]
    release_tick = max(save.release_tick for save in group)
    needed_tick = min((tick for save in group for tick in save.unpack_ticks), default=release_tick)
    producer = graph.values[first.value].producer
    return Stored(
        storage=storage,
        num_bytes=graph.storages[storage].num_bytes,
        action=decision.action if decision is not None else "keep",
        decision=decision,
        module=first.module,
        op=graph.ops[producer].name if producer >= 0 else "",
        pack_tick=first.pack_tick,
        release_tick=release_tick,
        idle_seconds=clock.at(needed_tick) - clock.at(first.pack_tick),
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlanView:
    """All that a report shows.

    Attributes:
        graph: The step.
        plan: The plan.
        device: Where it runs.
        planned: The step under the plan.
        plain: The step with everything kept.
        stored: The saved storages, in the order of their first pack.
        measured: What was measured, None where nothing was.
        comparison: The outcomes of policies.
    """

    graph: StepGraph
    plan: MemoryPlan
    device: DeviceSpec
    planned: StepTrace
    plain: StepTrace
    stored: tuple[Stored, ...]
    measured: MeasuredStep | None
    comparison: tuple[PolicyOutcome, ...]

    @property
    def overhead(self) -> float | None:
        """Share by which the planned step is longer than the plain one."""
        return self.planned.step_seconds / self.plain.step_seconds - 1 if self.plain.step_seconds else None

    @property
    def gap_to_bound(self) -> float | None:
        """Share by which the planned step is longer than any plan within the budget must be."""
        bound = self.plan.bound_seconds
        return max(0.0, self.planned.step_seconds / bound - 1) if bound else None

    @property
    def forward_peak_bytes(self) -> int:
        """Predicted peak of forward."""
        return int(self.planned.memory[: self.planned.backward_tick].max(initial=0))

    @property
    def backward_peak_bytes(self) -> int:
        """Predicted peak of backward."""
        return int(self.planned.memory[self.planned.backward_tick :].max(initial=0))


def view_plan(
    graph: StepGraph,
    made: MemoryPlan,
    device: DeviceSpec,
    *,
    measured: MeasuredStep | None = None,
    comparison: Sequence[PolicyOutcome] | None = None,
) -> PlanView:
    """Follow a plan and collect what a report shows.

    Raises:
        PlanError: The plan is one for another step, or the step has no op.
    """
    if not graph.ops:
        raise PlanError("the step has no op, so there is nothing to show: record a forward and a backward")
    problem = Problem(graph)
    return PlanView(
        graph=graph,
        plan=made,
        device=device,
        planned=follow(problem, made, device),
        plain=follow(problem, None, device),
        stored=stored_in(graph, made),
        measured=measured,
        comparison=tuple(comparison or ()),
    )
