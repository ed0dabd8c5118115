"""What measured steps change in the next plan: a margin for memory, and whether times call for another plan.

The margin is for memory that a plan does not foresee, or that is not there. It is counted as what is on the device
beside the step, so it is in the predicted peak, and in the smallest feasible budget that an error tells.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from lightning_offload.errors import BudgetInfeasibleError
from lightning_offload.graph.device_spec import DeviceSpec
from lightning_offload.graph.memory_plan import MemoryPlan
from lightning_offload.graph.step_graph import StepGraph
from lightning_offload.planning.planner import plan as make_plan


def plan_with_margin(
    graph: StepGraph,
    device: DeviceSpec,
    budget_bytes: int | None,
    *,
    usable_bytes: int | None,
    shortfall_bytes: int,
    must_fit: bool,
    **how: Any,
) -> MemoryPlan:
    """Plan a step so that its measured peak is within the budget; predictions and floor include the margin.

    Args:
        graph: The step.
        device: Where it runs.
        budget_bytes: Peak of live device bytes allowed, None for no limit.
        usable_bytes: Device memory that there turned out to be, where that is less.
        shortfall_bytes: By how much measured peaks exceeded predicted ones.
        must_fit: Whether a budget that cannot be met raises; the plan with the lowest peak is made otherwise.
        how: Further keywords of :func:`~lightning_offload.planning.planner.plan`.

    Raises:
        BudgetInfeasibleError: The budget is below the floor.
    """
    counted = dataclasses.replace(graph, extra_bytes=graph.extra_bytes + shortfall_bytes)
    limits = [limit for limit in (budget_bytes, usable_bytes) if limit is not None]
    try:
        plan = make_plan(counted, device, min(limits, default=None), **how)
    except BudgetInfeasibleError as error:
        is_within_budget = budget_bytes is None or (error.floor_bytes <= budget_bytes and min(limits) < budget_bytes)
        if must_fit and not is_within_budget:
            raise
        plan = make_plan(counted, device, error.floor_bytes, **how)
    plain_peak_bytes = plan.plain_peak_bytes - shortfall_bytes
    return dataclasses.replace(plan, budget_bytes=budget_bytes, plain_peak_bytes=plain_peak_bytes)


def beside(plan: MemoryPlan, num_bytes: int) -> MemoryPlan:
    """The same plan beside so many bytes more, or fewer, that are on the device all the time."""
    return dataclasses.replace(
        plan,
        floor_bytes=plan.floor_bytes + num_bytes,
        plain_peak_bytes=plan.plain_peak_bytes + num_bytes,
        predicted_peak_bytes=plan.predicted_peak_bytes + num_bytes,
    )


_STALL_FACTOR = 1.1  # stalls beyond this multiple of the predicted ones, and beyond
_SHARE = 0.02  # this share of the step, are worth another plan
_MUCH_FASTER, _MUCH_SLOWER = 0.9, 1.1


def links_were_wrong(plan: MemoryPlan, stall_seconds: float, *, is_slower: bool, is_faster: bool) -> bool:
    """Whether links that turned out slower or faster are worth another plan.

    Args:
        plan: What was executed.
        stall_seconds: Time that compute waited for copies.
        is_slower: Whether a link turned out slower than the plan counts on; that matters if it shows in stalls.
        is_faster: Whether one turned out faster; that matters if the plan costs time.
    """
    allowed = _STALL_FACTOR * plan.predicted_stall_seconds + _SHARE * plan.predicted_step_seconds
    is_costly = plan.predicted_step_seconds > (1 + _SHARE) * plan.plain_step_seconds
    return (is_slower and stall_seconds > allowed) or (is_faster and is_costly)


def compute_factor(plan: MemoryPlan, computing_seconds: float, before: float | None) -> float:
    """By how much the ops' durations are wrong on an accelerator; 1 as long as that is not clear.

    Ops timed one by one take as long as the host needs to launch them at the least; a step as a whole shows how much
    shorter they are back to back. A step that is slow once may have waited for the host, or for the allocator; one
    that is so again shows that the durations are those of another machine, or of a cooler one.

    Args:
        plan: What was executed.
        computing_seconds: What a step took, stalls aside.
        before: The same of the last measured step before it; None if that ran under another plan.
    """
    predicted = plan.predicted_step_seconds - plan.predicted_stall_seconds
    if 0 < computing_seconds < _MUCH_FASTER * predicted:
        return computing_seconds / predicted
    lasting = min(computing_seconds, before) if before is not None else 0.0
    return lasting / predicted if lasting > _MUCH_SLOWER * predicted > 0 else 1.0
