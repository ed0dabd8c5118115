"""The planner: keep, swap or recompute for each storage so that the step fits the budget and costs little.

Good choices come from three sides: orders in which storages leave the device (:mod:`~.orders`), of which the shortest
prefix that fits is taken; fractions of a linear relaxation (:mod:`~.rounding`); and every published policy, so that
none of them is ever better. The best few are improved by small changes (:mod:`~.local_search`). Every trial is
simulated in full. The floor's choice, waiting for each copy, is the last resort, so there is a plan whenever the
budget is at least the floor.

Effort is counted in simulations, by the number of storages and fewer for long steps, so plans do not depend on the
machine's speed. A limit in seconds is used up: small changes go on until then, and what is not begun by then is left.

Shortfall: a heuristic, so no optimality is claimed; every plan reports its gap to :mod:`~.bound`.
"""

from __future__ import annotations

import numpy as np

from lightning_offload.errors import BudgetInfeasibleError
from lightning_offload.graph.memory_plan import MemoryPlan
from lightning_offload.planning.arrays import Codes
from lightning_offload.planning.local_search import BOLD, PATIENT, improve
from lightning_offload.planning.orders import Order, families
from lightning_offload.planning.plans import Setting, build_plan, relabelled
from lightning_offload.planning.relaxation import MAX_ITEMS
from lightning_offload.planning.rounding import roundings
from lightning_offload.planning.search import Choice, Search

_MAX_ROWS = 120_000_000  # that local search simulates, in all; a second's worth or two where it is compiled
_TRIALS_PER_CANDIDATE = 16
_MIN_TRIALS = 320
_MANY_ROWS = 200_000  # of a step in which each simulation counts
_NUM_STARTS = 3
_OPTIMAL = 1 + 1e-9  # of the lower bound: no policy can be faster


def auto(setting: Setting) -> MemoryPlan:
    """Plan a step within a budget, as fast as the search finds.

    Raises:
        BudgetInfeasibleError: The budget is below the floor.
    """
    limit = setting.budget_bytes
    if limit is None or setting.plain.peak_bytes <= limit:
        return build_plan(setting, "auto", {}, setting.plain)
    setting.require_feasible()
    search = Search(setting)
    is_few = setting.is_provisional or setting.problem.num_rows > _MANY_ROWS
    search.try_(setting.problem.codes(setting.floor_actions))
    starts = [
        c for order in families(setting, few=is_few) if not search.is_over and (c := _shortest_prefix(search, order))
    ]
    if setting.is_provisional:
        return _plan(setting, search.best, None)
    if len(setting.problem.candidates) <= MAX_ITEMS and not search.is_over:
        starts += [choice for codes, rest in roundings(setting) if (choice := _filled(search, codes, rest))]
    rival = _best_policy(search)
    starts += [search.best] if search.best is not None else []
    _improve(search, starts)
    return _plan(setting, search.best, rival)


def _plan(setting: Setting, best: Choice | None, rival: MemoryPlan | None) -> MemoryPlan:
    """The fastest of the best choice, the best policy's plan, and the floor's."""
    seconds = best.seconds if best is not None else setting.floor.step_seconds
    if rival is not None and rival.predicted_step_seconds < seconds:
        return relabelled(rival, "auto")
    if best is None or seconds > setting.floor.step_seconds:
        return build_plan(setting, "auto", setting.floor_actions, setting.floor)
    problem = setting.problem
    timeline = setting.simulator.timeline(best.codes, best.no_memo)
    no_memo = frozenset(int(s) for s in problem.order[np.flatnonzero(best.no_memo)])
    return build_plan(setting, "auto", problem.actions(best.codes), timeline, no_memo)


def _best_policy(search: Search) -> MemoryPlan | None:
    """The fastest plan of a published policy; their choices are tried with schedules of our own as well."""
    from lightning_offload.planning.policies import PUBLISHED  # which this is one of, for whoever asks by name

    setting = search.setting
    plans = []
    for policy in PUBLISHED.values():
        if search.is_out_of_time or search.is_within(_OPTIMAL):
            break
        try:
            plan = policy(setting)
        except BudgetInfeasibleError:
            continue
        plans.append(plan)
        actions = {decision.storage: decision.action for decision in plan.decisions}
        no_memo = frozenset(decision.storage for decision in plan.decisions if not decision.memo)
        search.try_(setting.problem.codes(actions), setting.problem.flags(no_memo))
    return min(plans, key=lambda plan: plan.predicted_step_seconds, default=None)


def _shortest_prefix(search: Search, order: Order, codes: Codes | None = None) -> Choice | None:
    """The shortest feasible prefix of an order; chains may make a longer one worse, so the end is tried too."""
    problem = search.setting.problem
    base = np.zeros(len(problem.candidates), dtype=np.int8) if codes is None else codes
    numbers = np.array([problem.number[s] for s, _ in order], dtype=np.int64)
    actions = problem.codes(dict(order))[numbers] if order else np.zeros(0, dtype=np.int8)

    def prefix(length: int) -> Choice:
        tried = base.copy()
        tried[numbers[:length]] = actions[:length]
        return search.try_(tried)

    whole = prefix(len(order))
    best = whole if whole.is_feasible else None
    low, high = 0, len(order)
    while low < high and not search.is_over:
        middle = (low + high) // 2
        choice = prefix(middle)
        if choice.is_feasible:
            best, high = choice, middle
        else:
            low = middle + 1
    return best


def _filled(search: Search, codes: Codes, rest: Order) -> Choice | None:
    """A choice with the shortest prefix of an order beside it that makes it fit."""
    choice = search.try_(codes)
    return choice if choice.is_feasible else _shortest_prefix(search, rest, codes)


def _improve(search: Search, starts: list[Choice]) -> None:
    """Improve the best few choices, most of all the one that comes out best; again and again where there is time."""
    setting = search.setting
    count, num_rows = len(setting.problem.candidates), max(1, setting.problem.num_rows)
    num_trials = min(max(_MIN_TRIALS, _TRIALS_PER_CANDIDATE * count), _MAX_ROWS // num_rows)
    distinct = {choice.codes.tobytes(): choice for choice in sorted(starts, key=lambda c: -c.seconds)}
    best = sorted(distinct.values(), key=lambda c: c.seconds)[:_NUM_STARTS]
    if not best:
        return
    improved = [improve(search, choice, num_trials // (2 * len(best)), seed=setting.seed) for choice in best]
    choice = min(improved, key=lambda c: c.seconds)
    seed = setting.seed + 1
    while True:
        before = search.num_trials
        for temper in (PATIENT, BOLD):
            choice = improve(search, choice, num_trials // 4, temper=temper, seed=seed)
        seed += 1
        if setting.seconds is None or search.is_over or search.num_trials == before:
            break
