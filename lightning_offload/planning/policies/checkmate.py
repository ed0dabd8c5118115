"""Checkmate: rematerialization by an integer program, relaxed and rounded.

Jain, Jain, Nrusimha, Gholami, Abbeel, Keutzer, Stoica, Gonzalez, "Checkmate: Breaking the Memory Wall with Optimal
Tensor Rematerialization", MLSys 2020, arXiv 1910.02653. What to keep and what to compute again is a mixed integer
program; its two-phase rounding solves the relaxation for a budget that is less than the real one by a margin, rounds
what is kept, and computes again exactly what is then missing.

Departures. The program is this package's relaxation (:mod:`~lightning_offload.planning.relaxation`) with nothing
swapped, which has one choice for each saved storage in place of one for each op and stage. The paper rounds at one
half, or at random; here every threshold is tried, that is every prefix of the storages by the fraction that is
recomputed, for several margins, and the fastest step that fits counts; where none does, the largest are recomputed
first. Without a budget nothing is recomputed.
"""

from __future__ import annotations

import dataclasses

from lightning_offload.errors import BudgetInfeasibleError
from lightning_offload.graph.memory_plan import MemoryPlan
from lightning_offload.planning.policies.fitting import Fitting, Ordered, Tried
from lightning_offload.planning.relaxation import relax
from lightning_offload.planning.request import PlanRequest

_MARGINS = (0.0, 0.1, 0.3)  # shares of what lies between the floor and the budget


def checkmate(request: PlanRequest) -> MemoryPlan:
    """Round the relaxed program at the threshold that is fastest."""
    fitting = Fitting(request, "checkmate").one(Tried(actions={}))
    if request.budget_bytes is not None and request.plain.peak_bytes > request.budget_bytes:
        margins = _MARGINS[: request.max_prefixes and 1]
        for margin in margins:
            fitting.prefixes(by_fraction(request, margin))
    try:
        return fitting.plan()
    except BudgetInfeasibleError:  # the smallest budget of all must not depend on the one that is given
        return Fitting(request, "checkmate").prefixes(_largest_first(request)).plan()


def by_fraction(request: PlanRequest, margin: float) -> Ordered:
    """What can be recomputed, by the fraction of it that a relaxed plan recomputes within less than the budget.

    Args:
        request: The step, the device and the budget.
        margin: By which share of what lies between the floor and the budget to plan for less.
    """
    assert request.budget_bytes is not None
    problem, floor_bytes = request.problem, min(request.floor.peak_bytes, request.budget_bytes)
    nowhere = dataclasses.replace(
        request.device, host_memory_bytes=0, disk_write_bytes_per_second=0.0, disk_read_bytes_per_second=0.0
    )
    budget = request.budget_bytes - int(margin * (request.budget_bytes - floor_bytes))
    fractions = relax(problem, nowhere, budget, seconds=request.seconds).recompute
    return sorted(_largest_first(request), key=lambda pair: -fractions.get(pair[0], 0.0))


def _largest_first(request: PlanRequest) -> Ordered:
    again = [c for c in request.problem.candidates.values() if request.problem.source(c) is not None]
    again.sort(key=lambda c: (-c.num_bytes, c.storage))
    return [(c.storage, "recompute") for c in again]
