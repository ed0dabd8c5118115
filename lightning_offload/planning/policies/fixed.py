"""Fixed choices: keep everything, swap everything, recompute everything that can be.

``all_swap`` is what ``torch.autograd.graph.save_on_cpu`` does, with one copy for each storage, none of
parameters, and copies overlapped with compute. ``all_recompute`` is memory-centric recomputation in the sense
of SuperNeurons (PPoPP'18, arXiv 1801.04380) with memoised chains; what cannot be replayed is kept.
"""

from __future__ import annotations

from lightning_offload.graph.memory_plan import Action, MemoryPlan
from lightning_offload.planning.floor import swap_everything, swap_what_fits
from lightning_offload.planning.plans import Setting, build_plan, describe
from lightning_offload.planning.simulator import simulate
from lightning_offload.planning.tiers import must_fit_host


def keep_all(setting: Setting) -> MemoryPlan:
    """Keep every saved tensor, as plain autograd does."""
    return _fixed(setting, "keep-all", {})


def all_swap(setting: Setting) -> MemoryPlan:
    """Swap every saved tensor; where the tiers are too small for all of them, the rest is kept."""
    problem, limit = setting.problem, setting.device.host_memory_bytes
    if limit is None or not must_fit_host(setting.device):
        return _fixed(setting, "all-swap", swap_everything(problem))
    return _fixed(setting, "all-swap", swap_what_fits(problem, limit))


def all_recompute(setting: Setting) -> MemoryPlan:
    """Recompute every saved tensor that can be."""
    actions: dict[int, Action] = {s: "recompute" for s, c in setting.problem.candidates.items() if c.can_recompute}
    return _fixed(setting, "all-recompute", actions)


def _fixed(setting: Setting, policy: str, actions: dict[int, Action]) -> MemoryPlan:
    limit = setting.budget_bytes
    timeline = simulate(setting.problem, actions, setting.device, limit_bytes=limit)
    if limit is not None and timeline.peak_bytes > limit:
        tight = simulate(setting.problem, actions, setting.device, overlap=False)
        if tight.peak_bytes > limit:
            op = setting.problem.graph.op_at(tight.peak_tick)
            raise setting.infeasible(tight.peak_bytes, describe(op) if op else "persistent state", policy)
        timeline = tight
    return build_plan(setting, policy, actions, timeline)
