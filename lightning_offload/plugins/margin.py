"""Plans with a margin for what measured steps showed: memory that the plan does not foresee, or that is not there.

The margin is counted as what is on the device beside the step. So it is in the predicted peak, and in the smallest
feasible budget that an error tells.
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
