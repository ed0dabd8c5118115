"""A cheaper lower bound, for steps that are too large for a linear program and as a safety net.

Proof idea: at any tick a feasible plan must have the excess over the budget in storages that are then absent. One
that is absent by swapping costs at least the compute that its copies take, ``copy_interference`` of their duration
(time that compute spends waiting for them instead costs more, as that share is at most 1); one that is absent by
recomputation costs at least its own producer, whose time is shared by bytes among what it makes. Taking the
cheapest bytes first, and a fraction of the last storage, relaxes the choice, so no plan is cheaper.

Assumptions: replays and copies take the modelled time. Shortfall: links are taken to be infinitely fast and chains
of replays to be free, so it is loose where either dominates; and it looks at the peak's tick alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_offload.graph.device_spec import DeviceSpec
from lightning_offload.planning.problem import Candidate, Problem
from lightning_offload.planning.relaxation.facts import Item
from lightning_offload.planning.simulator import Timeline


def knapsack(
    problem: Problem, device: DeviceSpec, items: Sequence[Item], plain: Timeline, budget_bytes: int
) -> tuple[float, dict[int, float], dict[int, float]]:
    """Solve it.

    Returns:
        Seconds of the step, and by storage the fractions swapped and recomputed.
    """
    tick, excess = plain.peak_tick, plain.peak_bytes - budget_bytes
    swap: dict[int, float] = {}
    recompute: dict[int, float] = {}
    absent = [item for item in items if item.candidate.death <= tick < item.until]
    priced = sorted((_price(problem, item, device), item.candidate.storage, item) for item in absent)
    seconds = plain.step_seconds
    for (price, is_swap), s, item in priced:
        taken = min(item.candidate.num_bytes, excess)
        (swap if is_swap else recompute)[s] = taken / item.candidate.num_bytes
        seconds += price * taken
        excess -= taken
        if excess <= 0:
            break
    return seconds, swap, recompute


def _price(problem: Problem, item: Item, device: DeviceSpec) -> tuple[float, bool]:
    """Seconds per byte, and whether that is for a swap."""
    c = item.candidate
    swap = swap_seconds(c, device) if c.can_swap else float("inf")
    replay = replay_seconds(problem, c) if c.can_recompute else float("inf")
    seconds = min(swap, replay) if item.is_read else 0.0
    return seconds / c.num_bytes, swap <= replay


def swap_seconds(candidate: Candidate, device: DeviceSpec) -> float:
    """The least compute time that swapping a storage out and back costs."""
    rates = 1 / device.d2h_bytes_per_second + 1 / device.h2d_bytes_per_second
    return candidate.num_bytes * rates * device.copy_interference


def replay_seconds(problem: Problem, candidate: Candidate) -> float:
    """A storage's share of the time of its producer."""
    op = problem.graph.ops[problem.graph.values[candidate.value].producer]
    made = sum(problem.graph.storages[problem.graph.values[v].storage].num_bytes for v in op.outputs)
    return op.seconds * candidate.num_bytes / max(made, 1)
