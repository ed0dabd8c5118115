"""Named policies: pure functions of one signature, ``policy(setting) -> MemoryPlan``.

``auto`` is the planner; the others are fixed choices, which ignore how much the budget would allow and fail
where it allows less.
"""

from __future__ import annotations

from collections.abc import Callable

from lightning_offload.errors import PolicyError
from lightning_offload.graph.device_spec import DeviceSpec
from lightning_offload.graph.memory_plan import MemoryPlan
from lightning_offload.graph.step_graph import StepGraph
from lightning_offload.planning.auto import auto
from lightning_offload.planning.plans import Setting
from lightning_offload.planning.policies.fixed import all_recompute, all_swap, keep_all
from lightning_offload.planning.problem import Problem

Policy = Callable[[Setting], MemoryPlan]

POLICIES: dict[str, Policy] = {
    "auto": auto,
    "keep-all": keep_all,
    "all-swap": all_swap,
    "all-recompute": all_recompute,
}


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
) -> MemoryPlan:
    """Plan a step.

    Args:
        graph: The recorded step.
        device: Where it runs.
        budget_bytes: Peak of live device bytes allowed, None for no limit.
        policy: Who plans.
        keep: Storages that must stay on the device.

    Raises:
        PolicyError: No such policy.
        BudgetInfeasibleError: The policy cannot meet the budget; names the smallest it can meet.
    """
    return POLICIES[check_policy(policy)](Setting(Problem(graph, keep), device, budget_bytes))
