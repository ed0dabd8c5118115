"""AccUDNN's memory optimizer: swaps chosen by a performance model, feasible first, then efficient.

Guo et al., "AccUDNN: A GPU Memory Efficient Accelerator for Training Ultra-deep Deep Neural Networks", arXiv
1901.06773. Profiled layer times, saved bytes and link rates predict the step under a set of swaps, in which each
direction is one serial lane. Storages of the longest reuse distance are swapped until the step fits; then swaps are
given up or exchanged for others while compute waits less.

Departures. The published text gives the approach but no equations that were at hand, so this is a reconstruction:
the performance model is this package's simulator, and the number of repairs is bounded. The paper's layers are saved
storages here. Without a budget nothing is swapped. What a host of limited size has no room for stays. The
paper's other half, the choice of minibatch and learning rate, is no memory policy.
"""

from __future__ import annotations

from lightning_offload.graph.memory_plan import MemoryPlan
from lightning_offload.planning.policies.fitting import (
    Ordered,
    SimulatedActions,
    fit_host,
    fits,
    plan_of,
    shortest_prefix,
    swap,
)
from lightning_offload.planning.policies.layers import layers_of
from lightning_offload.planning.request import PlanRequest
from lightning_offload.planning.simulator import simulate

_MAX_REPAIRS = 24


def accudnn(request: PlanRequest) -> MemoryPlan:
    """Swap storages of the longest reuse distance, and repair what stalls."""
    layers = layers_of(request.problem)
    by_distance = sorted(layers.swappable(), key=lambda s: (-layers.away_seconds(layers.by_storage[s]), s))
    allowed = fit_host(request, by_distance)
    order: Ordered = [(s, "swap") for s in allowed]
    choice = shortest_prefix(request, "accudnn", order)
    if choice.actions:
        choice = _repair(request, choice, allowed)
    return plan_of(request, "accudnn", choice.timeline, choice.actions)


def _repair(request: PlanRequest, choice: SimulatedActions, allowed: list[int]) -> SimulatedActions:
    """Give up swaps, then exchange them, shortest reuse distance first, where the step still fits and gets faster."""
    swapped = [s for s in reversed(allowed) if s in choice.actions]
    for s in swapped[:_MAX_REPAIRS]:
        choice = _better(request, choice, set(choice.actions) - {s})
    others = [s for s in allowed if s not in choice.actions]
    remaining = [s for s in swapped if s in choice.actions]
    for s, other in list(zip(remaining, others, strict=False))[:_MAX_REPAIRS]:
        choice = _better(request, choice, (set(choice.actions) - {s}) | {other})
    return choice


def _better(request: PlanRequest, choice: SimulatedActions, storages: set[int]) -> SimulatedActions:
    actions = swap(sorted(storages))
    timeline = simulate(request.problem, actions, request.device, limit_bytes=request.budget_bytes)
    is_better = fits(request, timeline) and timeline.step_seconds < choice.timeline.step_seconds
    return SimulatedActions(actions, timeline) if is_better else choice
