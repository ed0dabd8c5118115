"""What a report is made of: a plan followed on the simulated clock, beside what was measured and other policies."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from lightning_offload.errors import BudgetInfeasibleError, PlanError
from lightning_offload.graph.device_spec import DeviceSpec
from lightning_offload.graph.memory_plan import Action, Decision, MemoryPlan
from lightning_offload.graph.step_graph import Save, StepGraph
from lightning_offload.planning.planner import POLICIES, plan
from lightning_offload.planning.problem import Problem
from lightning_offload.planning.trace import StepTrace, follow

__all__ = ["MeasuredStep", "PlanView", "PolicyOutcome", "Stored", "compare_policies", "view_plan"]


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
    """

    step_seconds: float | None = None
    stall_seconds: float | None = None
    peak_bytes: int | None = None
    forward_peak_bytes: int | None = None
    backward_peak_bytes: int | None = None
    optimizer_peak_bytes: int | None = None
    host_peak_bytes: int | None = None
    disk_peak_bytes: int | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PolicyOutcome:
    """What a policy makes of a step within a budget.

    Attributes:
        policy: Its name.
        step_seconds: Predicted duration, None where it is infeasible.
        plain_step_seconds: Predicted duration with everything kept, None where it is infeasible.
        peak_bytes: Predicted peak, None where it is infeasible.
        floor_bytes: The smallest budget that it can meet, where it is infeasible.
    """

    policy: str
    step_seconds: float | None = None
    plain_step_seconds: float | None = None
    peak_bytes: int | None = None
    floor_bytes: int | None = None

    @property
    def overhead(self) -> float | None:
        """Share by which the step is longer than with everything kept; None where that is not known."""
        if self.step_seconds is None or not self.plain_step_seconds:
            return None
        return self.step_seconds / self.plain_step_seconds - 1

    @classmethod
    def of_plan(cls, made: MemoryPlan) -> PolicyOutcome:
        """The outcome of a policy that made a plan."""
        return cls(
            policy=made.policy,
            step_seconds=made.predicted_step_seconds,
            plain_step_seconds=made.plain_step_seconds,
            peak_bytes=made.predicted_peak_bytes,
        )


def compare_policies(
    graph: StepGraph,
    device: DeviceSpec,
    budget_bytes: int | None,
    *,
    policies: Iterable[str] | None = None,
    keep: frozenset[int] = frozenset(),
) -> tuple[PolicyOutcome, ...]:
    """Plan a step under several policies.

    Args:
        graph: The recorded step.
        device: Where it runs.
        budget_bytes: The budget of each, None for no limit.
        policies: Their names; by default all there are.
        keep: Storages that must stay on the device.

    Raises:
        PolicyError: There is no policy of one of the names.
    """
    outcomes = []
    for name in POLICIES if policies is None else policies:
        try:
            outcomes.append(PolicyOutcome.of_plan(plan(graph, device, budget_bytes, policy=name, keep=keep)))
        except BudgetInfeasibleError as error:
            outcomes.append(PolicyOutcome(policy=name, floor_bytes=error.floor_bytes))
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
    """

    storage: int
    num_bytes: int
    action: Action
    decision: Decision | None
    module: str
    op: str
    pack_tick: int
    release_tick: int


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

    def bytes_of(self, action: Action) -> int:
        """Saved bytes under an action."""
        return sum(stored.num_bytes for stored in self.stored if stored.action == action)

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
        stored=_stored(graph, made),
        measured=measured,
        comparison=tuple(comparison or ()),
    )


def _stored(graph: StepGraph, made: MemoryPlan) -> tuple[Stored, ...]:
    decisions = {decision.storage: decision for decision in made.decisions}
    saves: dict[int, list[Save]] = {}
    for save in sorted(graph.saves, key=lambda save: save.pack_tick):
        saves.setdefault(graph.values[save.value].storage, []).append(save)
    found = []
    for storage, group in saves.items():
        if graph.storages[storage].is_persistent:
            continue
        producer = graph.values[group[0].value].producer
        decision = decisions.get(storage)
        found.append(
            Stored(
                storage=storage,
                num_bytes=graph.storages[storage].num_bytes,
                action=decision.action if decision is not None else "keep",
                decision=decision,
                module=group[0].module,
                op=graph.ops[producer].name if producer >= 0 else "",
                pack_tick=group[0].pack_tick,
                release_tick=max(save.release_tick for save in group),
            )
        )
    return tuple(found)
