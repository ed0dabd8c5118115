"""AccUDNN's memory optimizer: swaps chosen by a performance model, feasible first, then efficient.

Guo et al., "AccUDNN: A GPU Memory Efficient Accelerator for Training Ultra-deep Deep Neural Networks", arXiv
1901.06773. Profiled layer times, saved bytes and link rates predict the step under a set of swaps, in which each
direction is one serial lane. Storages of the longest reuse distance are swapped, as many as are fastest within the
budget; then swaps are given up or exchanged for others while compute waits less.

Departures. The published text gives the approach but no equations that were at hand, so this is a reconstruction:
the performance model is this package's simulator, and repairs go on until none helps. The paper's layers are saved
storages here. Without a budget nothing is swapped. What a host of limited size has no room for stays. The
paper's other half, the choice of minibatch and learning rate, is no memory policy.
"""

from __future__ import annotations

from lightning_offload.graph.memory_plan import MemoryPlan
from lightning_offload.planning.policies.fitting import Fitting, Tried, fit_host, num_tried, swap
from lightning_offload.planning.policies.layers import layers_of
from lightning_offload.planning.request import PlanRequest, build_plan

_MAX_ROUNDS = 8  # in which swaps are given up or exchanged, while that gains


def accudnn(request: PlanRequest) -> MemoryPlan:
    """Swap storages of the longest reuse distance, and repair what stalls."""
    layers = layers_of(request.problem)
    by_distance = sorted(layers.swappable(), key=lambda s: (-layers.away_seconds(layers.by_storage[s]), s))
    allowed = fit_host(request, by_distance)
    tried, timeline = Fitting(request, "accudnn").prefixes([(s, "swap") for s in allowed]).found()
    repaired = _repaired(request, set(tried.actions), allowed, timeline.step_seconds)
    if repaired != set(tried.actions):
        tried = Tried(actions=swap(sorted(repaired)))
        timeline = request.simulator.timeline(request.problem.codes(tried.actions))
    return build_plan(request, "accudnn", tried.actions, timeline)


def _repaired(request: PlanRequest, swapped: set[int], allowed: list[int], seconds: float) -> set[int]:
    """Give up swaps, then exchange them, shortest reuse distance first, while the step fits and gets faster."""
    num_left = num_tried(request)
    for _ in range(_MAX_ROUNDS):
        before = seconds
        leaving = [s for s in reversed(allowed) if s in swapped]
        others = [s for s in allowed if s not in swapped]
        exchanged = zip(leaving, others, strict=False)
        for changed in [*(({s}, set[int]()) for s in leaving), *(({s}, {other}) for s, other in exchanged)]:
            if num_left <= 0:
                return swapped
            if not changed[0] <= swapped or changed[1] & swapped:
                continue
            num_left -= 1
            without = (swapped - changed[0]) | changed[1]
            outcome = request.simulator.run(request.problem.codes(swap(without)))
            if outcome.peak_bytes <= (request.budget_bytes or 0) and outcome.step_seconds < seconds:
                swapped, seconds = without, outcome.step_seconds
        if seconds == before:
            break
    return swapped
