"""Plans a step by a policy's name.

``auto`` is our own planner. ``keep-all``, ``all-swap`` and ``all-recompute`` are fixed choices, the others are
published systems (:mod:`~lightning_offload.planning.policies`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

from lightning_offload.errors import BudgetInfeasibleError, PolicyError
from lightning_offload.graph.device_spec import DeviceSpec
from lightning_offload.graph.host_layout import plan_layout
from lightning_offload.graph.memory_plan import MemoryPlan
from lightning_offload.graph.step_graph import StepGraph
from lightning_offload.planning.auto import auto
from lightning_offload.planning.policies import PUBLISHED, Policy
from lightning_offload.planning.policies.fixed import all_recompute, all_swap, keep_all
from lightning_offload.planning.problem import Problem
from lightning_offload.planning.request import PlanRequest

POLICIES: dict[str, Policy] = {
    "auto": auto,
    "keep-all": keep_all,
    "all-swap": all_swap,
    "all-recompute": all_recompute,
    **PUBLISHED,
}
_MAX_RETRIES = 3


def check_policy(name: str) -> str:
    """The name of a policy, checked.

    Raises:
        PolicyError: There is none of that name.
    """
    if not isinstance(name, str) or name not in POLICIES:
        raise PolicyError(f"unknown policy {name!r}: choose one of {', '.join(map(repr, POLICIES))}")
    return name


def plan(
    graph: StepGraph,
    device: DeviceSpec,
    budget_bytes: int | None,
    *,
    policy: str = "auto",
    keep: frozenset[int] = frozenset(),
    seconds: float | None = None,
    seed: int = 0,
    is_provisional: bool = False,
) -> MemoryPlan:
    """Plan a step.

    Args:
        graph: The recorded step.
        device: Where it runs.
        budget_bytes: Peak of live device bytes allowed, None for no limit.
        policy: Who plans.
        keep: Storages that must stay on the device.
        seconds: When to stop searching, roughly; by default a search ends by itself, after an effort that does not
            depend on the machine's speed.
        seed: Of what a search does at random.
        is_provisional: Whether the plan is soon made again, so that little effort is enough.

    Raises:
        PolicyError: No such policy.
        BudgetInfeasibleError: The policy cannot meet the budget; names the smallest it can meet.
    """
    make, problem = POLICIES[check_policy(policy)], Problem(graph, keep)
    made = make(PlanRequest(problem, device, budget_bytes, seconds, seed, is_provisional))
    limit = planned_for = device.host_memory_bytes
    for _ in range(_MAX_RETRIES):
        excess = _host_excess(graph, made, limit)
        if planned_for is None or excess <= 0:
            break
        planned_for = max(0, planned_for - excess)
        try:
            smaller = dataclasses.replace(device, host_memory_bytes=planned_for)
            made = make(PlanRequest(problem, smaller, budget_bytes, seconds, seed, is_provisional))
        except BudgetInfeasibleError:
            break  # offsets are hints: what has no place of its own may still find one
    return made


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
    """Plan a step so that its measured peak is within the budget, by a margin for what a plan does not foresee.

    The margin is counted as what is on the device beside the step, so it is in the predicted peak, and in the smallest
    feasible budget that an error tells.

    Args:
        graph: The step.
        device: Where it runs.
        budget_bytes: Peak of live device bytes allowed, None for no limit.
        usable_bytes: Device memory that there turned out to be, where that is less.
        shortfall_bytes: By how much measured peaks exceeded predicted ones.
        must_fit: Whether a budget that cannot be met raises; the plan with the lowest peak is made otherwise.
        how: Further keywords of :func:`plan`.

    Raises:
        BudgetInfeasibleError: The budget is below the floor.
    """
    counted = dataclasses.replace(graph, extra_bytes=graph.extra_bytes + shortfall_bytes)
    limits = [limit for limit in (budget_bytes, usable_bytes) if limit is not None]
    try:
        made = plan(counted, device, min(limits, default=None), **how)
    except BudgetInfeasibleError as error:
        is_within_budget = budget_bytes is None or (error.floor_bytes <= budget_bytes and min(limits) < budget_bytes)
        if must_fit and not is_within_budget:
            raise
        made = plan(counted, device, error.floor_bytes, **how)
    plain_peak_bytes = made.plain_peak_bytes - shortfall_bytes
    return dataclasses.replace(made, budget_bytes=budget_bytes, plain_peak_bytes=plain_peak_bytes)


def beside(made: MemoryPlan, num_bytes: int) -> MemoryPlan:
    """The same plan beside so many bytes more, or fewer, that are on the device all the time."""
    return dataclasses.replace(
        made,
        floor_bytes=made.floor_bytes + num_bytes,
        plain_peak_bytes=made.plain_peak_bytes + num_bytes,
        predicted_peak_bytes=made.predicted_peak_bytes + num_bytes,
    )


def _host_excess(graph: StepGraph, made: MemoryPlan, limit_bytes: int | None) -> int:
    """By how much a plan's layout on the host is larger than it may be: stays that do not nest leave gaps."""
    if limit_bytes is None or made.predicted_host_bytes == 0:
        return 0
    return plan_layout(graph, made).tier_bytes["host"] - limit_bytes
