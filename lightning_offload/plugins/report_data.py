"""What a memory plugin knows about its step: predicted and measured figures, never mixed."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Literal

from lightning_offload.graph.memory_plan import Action

if TYPE_CHECKING:
    from lightning_offload.plugins.lifecycle import StepKind

Phase = Literal["idle", "recording", "verifying", "measuring", "planned", "unplanned"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Figures of the last step's shape; None where a figure is not known yet.

    Attributes:
        budget_bytes: The budget.
        floor_bytes: Smallest feasible budget.
        plain_peak_bytes: Predicted peak with everything kept.
        predicted_peak_bytes: Predicted peak under the plan.
        measured_peak_bytes: Peak of the last step that was measured.
        predicted_step_seconds: Predicted duration under the plan.
        measured_step_seconds: Duration of the last step.
        plain_step_seconds: Predicted duration with everything kept.
        bound_seconds: Lower bound on the duration of any plan within the budget.
        kept_bytes: Saved bytes that stay on the device.
        swapped_bytes: Saved bytes that are swapped.
        recomputed_bytes: Saved bytes that are recomputed.
        host_peak_bytes: Most host memory in use for swapped tensors.
        stall_seconds: Time that compute waited for copies in the last step.
        forward_peak_bytes: Measured peak of forward.
        backward_peak_bytes: Measured peak of backward.
        optimizer_peak_bytes: Peak of the optimizer's step; on a CPU its state, without temporaries.
        policy: Who planned.
        num_steps: Steps run.
        phase: What the last step did.
        num_mismatched: Storages whose replay did not give the same bits, and which are not recomputed any more.
    """

    budget_bytes: int | None
    floor_bytes: int | None
    plain_peak_bytes: int | None
    predicted_peak_bytes: int | None
    measured_peak_bytes: int | None
    predicted_step_seconds: float | None
    measured_step_seconds: float | None
    plain_step_seconds: float | None
    bound_seconds: float | None
    kept_bytes: int
    swapped_bytes: int
    recomputed_bytes: int
    host_peak_bytes: int
    stall_seconds: float
    forward_peak_bytes: int | None
    backward_peak_bytes: int | None
    optimizer_peak_bytes: int | None
    policy: str
    num_steps: int
    phase: Phase
    num_mismatched: int


_ACTIONS: tuple[Action, ...] = ("keep", "swap", "recompute")


def make_report(
    kind: StepKind,
    *,
    budget_bytes: int | None,
    measured_step_seconds: float | None,
    stall_seconds: float,
    host_peak_bytes: int,
    optimizer_peak_bytes: int | None,
    policy: str,
    num_steps: int,
    phase: Phase,
) -> Report:
    """The report of a kind of step, from its plan and from what the plugin measured."""
    plan, graph = kind.plan, kind.graph
    num_bytes = {action: plan.bytes_of(graph, action) if plan and graph else 0 for action in _ACTIONS}
    return Report(
        budget_bytes=budget_bytes,
        floor_bytes=plan.floor_bytes if plan else None,
        plain_peak_bytes=plan.plain_peak_bytes if plan else None,
        predicted_peak_bytes=plan.predicted_peak_bytes if plan else None,
        measured_peak_bytes=kind.measured_peak_bytes,
        predicted_step_seconds=plan.predicted_step_seconds if plan else None,
        measured_step_seconds=measured_step_seconds,
        plain_step_seconds=plan.plain_step_seconds if plan else None,
        bound_seconds=plan.bound_seconds if plan else None,
        kept_bytes=num_bytes["keep"],
        swapped_bytes=num_bytes["swap"],
        recomputed_bytes=num_bytes["recompute"],
        host_peak_bytes=host_peak_bytes,
        stall_seconds=stall_seconds,
        forward_peak_bytes=kind.forward_peak_bytes,
        backward_peak_bytes=kind.backward_peak_bytes,
        optimizer_peak_bytes=optimizer_peak_bytes,
        policy=policy,
        num_steps=num_steps,
        phase=phase,
        num_mismatched=len(kind.mismatched),
    )
