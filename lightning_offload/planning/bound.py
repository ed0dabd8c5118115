"""A lower bound on the step time of any plan within a budget.

Proof idea: look at the tick where everything-kept memory peaks. A feasible plan must have ``excess`` bytes of
the storages that are then on the device only because they are saved away from it. A storage that is away by
swapping costs at least the compute that its two copies take (``copy_interference`` of their duration); one that
is away by recomputation costs at least its own producer, whose time is shared among what it makes. Taking the
cheapest bytes first (what is never read costs nothing), and a fraction of the last storage, relaxes the
choice, so no plan is cheaper.

Assumptions: replays and copies take the modelled time; a swap's copies may be hidden completely. Shortfall:
neither the links' capacity nor chains of replays count, so the bound is loose where either dominates.
"""

from __future__ import annotations

import numpy as np

from lightning_offload.graph.device_spec import DeviceSpec
from lightning_offload.planning.problem import Candidate, Problem
from lightning_offload.planning.simulator import simulate


def bound_seconds(problem: Problem, device: DeviceSpec, budget_bytes: int | None) -> float:
    """Lower bound on the step time within a budget, in seconds."""
    plain = simulate(problem, {}, device)
    if budget_bytes is None or plain.peak_bytes <= budget_bytes:
        return plain.step_seconds
    excess = plain.peak_bytes - budget_bytes
    tick = int(np.argmax(plain.memory))
    read = {unpack.storage for unpack in problem.unpacks}
    in_use = {unpack.storage for unpack in problem.unpacks if unpack.tick <= tick}
    away = [c for c in problem.candidates.values() if c.death <= tick < c.release and c.storage not in in_use]
    prices = sorted(
        (cheapest_seconds(problem, c, device) / c.num_bytes if c.storage in read else 0.0, c.num_bytes) for c in away
    )
    seconds = plain.step_seconds
    for price, num_bytes in prices:
        taken = min(num_bytes, excess)
        seconds += price * taken
        excess -= taken
        if excess <= 0:
            break
    return seconds


def cheapest_seconds(problem: Problem, candidate: Candidate, device: DeviceSpec) -> float:
    """The least compute time that a storage's absence from the device costs."""
    options = []
    if candidate.can_swap:
        rates = 1 / device.d2h_bytes_per_second + 1 / device.h2d_bytes_per_second
        options.append(candidate.num_bytes * rates * device.copy_interference)
    if candidate.can_recompute:
        op = problem.graph.ops[problem.graph.values[candidate.value].producer]
        made = sum(problem.graph.storages[problem.graph.values[v].storage].num_bytes for v in op.outputs)
        options.append(op.seconds * candidate.num_bytes / max(made, 1))
    return min(options, default=0.0)
