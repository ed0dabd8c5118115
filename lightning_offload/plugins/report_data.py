"""What a memory plugin knows about its step: predicted and measured figures, never mixed."""

from __future__ import annotations

import dataclasses
from typing import Literal

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
