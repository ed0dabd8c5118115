"""Plans with a margin for what measured steps showed: memory that the plan does not foresee, or that is not there."""

from __future__ import annotations

import dataclasses
from typing import Any

from lightning_offload.errors import BudgetInfeasibleError
from lightning_offload.graph.device_spec import DeviceSpec
from lightning_offload.graph.memory_plan import MemoryPlan
from lightning_offload.graph.step_graph import StepGraph
from lightning_offload.planning.policies import plan as make_plan


def plan_with_margin(
    graph: StepGraph,
    device: DeviceSpec,
    budget_bytes: int | None,
    *,
    usable_bytes: int | None,
    shortfall_bytes: int,
    **how: Any,
) -> MemoryPlan:
    """Plan a step so that its measured peak is within the budget; predictions and floor include the margin.

    Args:
        graph: The step.
        device: Where it runs.
        budget_bytes: Peak of live device bytes allowed, None for no limit.
        usable_bytes: Device memory that there turned out to be, where that is less.
        shortfall_bytes: By how much measured peaks exceeded predicted ones.
        how: Further keywords of :func:`~lightning_offload.planning.policies.plan`.

    Raises:
        BudgetInfeasibleError: The budget is below the floor.
    """
    limits = [limit for limit in (budget_bytes, usable_bytes) if limit is not None]
    target = min(limits) - shortfall_bytes if limits else None
    try:
        plan = make_plan(graph, device, target, **how)
    except BudgetInfeasibleError as error:
        if target == budget_bytes or (budget_bytes is not None and error.floor_bytes > budget_bytes):
            raise
        # The budget itself can be met; only the margin for what was learned since cannot.
        plan = make_plan(graph, device, error.floor_bytes, **how)
    return dataclasses.replace(
        plan,
        budget_bytes=budget_bytes,
        floor_bytes=min(plan.floor_bytes + shortfall_bytes, max(plan.floor_bytes, plan.plain_peak_bytes)),
        predicted_peak_bytes=plan.predicted_peak_bytes + shortfall_bytes,
    )
