"""Checkmate: rematerialization by an integer program, relaxed and rounded.

Jain, Jain, Nrusimha, Gholami, Abbeel, Keutzer, Stoica, Gonzalez, "Checkmate: Breaking the Memory Wall with Optimal
Tensor Rematerialization", MLSys 2020, arXiv 1910.02653. What to keep and what to compute again is a mixed integer
program; its two-phase rounding solves the relaxation for a budget that is less than the real one by a margin, rounds
what is kept, and computes again exactly what is then missing.

Departures. The program is this package's relaxation (:mod:`~lightning_offload.planning.relaxation`) with nothing
swapped, which has one choice for each saved storage in place of one for each op and stage. The paper rounds at one
half, or at random, for margins below the budget; here every threshold is tried, that is every prefix of the storages
by the fraction that is recomputed, for programs of several budgets whatever the given one, and the fastest step that
fits counts; where none does, the largest storages are recomputed first. Without a budget nothing is recomputed.
"""

from __future__ import annotations

import dataclasses

from lightning_offload.graph.memory_plan import MemoryPlan
from lightning_offload.planning.policies.fitting import Fitting, Ordered, Tried
from lightning_offload.planning.problem import Problem
from lightning_offload.planning.relaxation import relax
from lightning_offload.planning.request import PlanRequest

_HEIGHTS = (0.05, 0.15, 0.3, 0.45, 0.6, 0.8)  # of budgets, between the floor and the plain peak


def checkmate(request: PlanRequest) -> MemoryPlan:
    """Round the relaxed program at the threshold that is fastest."""
    fitting = Fitting(request, "checkmate").one(Tried(actions={}))
    if request.budget_bytes is not None and request.plain.peak_bytes > request.budget_bytes:
        low, high = request.floor.peak_bytes, request.plain.peak_bytes
        budgets = [int(low + height * (high - low)) for height in _HEIGHTS]
        for budget in budgets if request.max_prefixes is None else [request.budget_bytes]:
            fitting.prefixes(by_fraction(request, budget))
        fitting.resort_to(largest_first(request.problem))
    return fitting.plan()


def by_fraction(request: PlanRequest, budget_bytes: int) -> Ordered:
    """What can be recomputed, by the fraction of it that a relaxed plan recomputes within a budget.

    Args:
        request: The step and the device.
        budget_bytes: That budget.
    """
    nowhere = dataclasses.replace(
        request.device, host_memory_bytes=0, disk_write_bytes_per_second=0.0, disk_read_bytes_per_second=0.0
    )
    fractions = relax(request.problem, nowhere, budget_bytes, seconds=request.seconds).recompute
    return sorted(largest_first(request.problem), key=lambda pair: -fractions.get(pair[0], 0.0))


def largest_first(problem: Problem) -> Ordered:
    """What can be recomputed, the largest storages first."""
    again = [c for c in problem.candidates.values() if problem.replay(c) is not None]
    again.sort(key=lambda c: (-c.num_bytes, c.storage))
    return [(c.storage, "recompute") for c in again]
