"""Fixed choices: keep everything, swap everything, recompute everything that can be.

``all_swap`` moves what ``torch.autograd.graph.save_on_cpu`` moves, with one copy for each storage, none of
parameters, and copies overlapped with compute; :mod:`~.save_on_cpu` waits for
them. ``all_recompute`` is memory-centric recomputation in the sense
of SuperNeurons (PPoPP'18, arXiv 1801.04380) with memoised chains; what cannot be replayed is kept.
"""

from __future__ import annotations

from lightning_offload.graph.memory_plan import Action, MemoryPlan
from lightning_offload.planning.policies.fitting import Fitting, Tried, everything_swapped
from lightning_offload.planning.request import PlanRequest


def keep_all(request: PlanRequest) -> MemoryPlan:
    """Keep every saved tensor, as plain autograd does."""
    return Fitting(request, "keep-all").one(Tried(actions={})).plan()


def all_swap(request: PlanRequest) -> MemoryPlan:
    """Swap every saved tensor; where the tiers are too small for all of them, the rest is kept."""
    return Fitting(request, "all-swap").one(Tried(actions=everything_swapped(request))).plan()


def all_recompute(request: PlanRequest) -> MemoryPlan:
    """Recompute every saved tensor that can be."""
    actions: dict[int, Action] = {s: "recompute" for s, c in request.problem.candidates.items() if c.can_recompute}
    return Fitting(request, "all-recompute").one(Tried(actions=actions)).plan()
