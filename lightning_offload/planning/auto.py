"""The planner: keep, swap or recompute for each storage so that the step fits the budget and costs little.

Good choices come from three sides: orders in which storages leave the device (:func:`~.search.families`), of which
the shortest prefix that fits is taken; fractions of a linear relaxation (:func:`~.search.roundings`); and every
published policy, so that none of them is ever better. What relaxations are rounded to is improved by small changes
(:class:`~.annealing.LocalSearch`) at once, one after the other until one is close to the bound: which of them leads
furthest is not seen before. Then the best of all is improved in longer and longer rounds, while that gains and the gap
is worth it. Where storages are large beside the budget, no small changes may lead from there to the best, so the
floor's choice is a start as well where the gap stays. Every trial is simulated in full. The floor's choice, waiting for
each copy, is the last resort, so there is a plan whenever the budget is at least the floor.

Policies that only swap, or only recompute, are left out where the best is below the bound of all plans that do; those
that take long to fit for large steps, too, and where the best is as near to the bound as they never come.

Effort is counted in simulations and grows with the gap to the bound, by the number of storages; it is less for long
steps, and where the simulation is not compiled. So plans do not depend on the machine's speed. A limit in seconds is
used up: small changes go on until then, and what is not begun by then is left.

Shortfall: a heuristic, so no optimality is claimed; every plan reports its gap to the bound of :mod:`~.relaxation`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from lightning_offload.errors import BudgetInfeasibleError
from lightning_offload.graph.memory_plan import MemoryPlan
from lightning_offload.planning.annealing import LocalSearch
from lightning_offload.planning.arrays import Codes
from lightning_offload.planning.kernels import is_compilable
from lightning_offload.planning.policies import ONLY, PUBLISHED
from lightning_offload.planning.relaxation import MAX_ITEMS
from lightning_offload.planning.request import PlanRequest, build_plan, choice_of
from lightning_offload.planning.search import Choice, Order, Search, families, roundings, written

_CLOSE = 1.01  # to the lower bound, in multiples of it: more starts are not looked for
_SLOW = {"checkmate": 1.001, "dtr": 1.03}  # policies that take long to fit: as near to the bound as they hardly come
_FIRST = (1.001, 4)
_ROUNDS = ((1.003, 8), (1.006, 12), (_CLOSE, 24), (_CLOSE, 48))
_ANEW = (1.02, 48)
"""Rounds of local search: gaps above which there is another one, and trials for each candidate."""
_MOST_ANEW = 2
_LEAST_GAIN = 0.02  # of the gap: a round that gains less is the last one
_FEW_CANDIDATES = 256  # so few that a search from the floor takes seconds
_MIN_TRIALS = 320
_MAX_ROWS = 600_000_000  # that local search simulates, in all: some seconds' worth
_MAX_PLAIN_ROWS = 8_000_000  # the same where the simulation is not compiled
_MANY_ROWS = 200_000  # of a step in which each simulation counts
_OPTIMAL = 1 + 1e-9  # of the lower bound
_MAX_PREFIXES = 16  # of each policy's order, before those around the best one
_FEW_PREFIXES = 8  # the same for long steps
_T = TypeVar("_T")


def auto(request: PlanRequest) -> MemoryPlan:
    """Plan a step within a budget, as fast as the search finds.

    Raises:
        BudgetInfeasibleError: The budget is below the floor.
    """
    limit = request.budget_bytes
    if limit is None or request.plain.peak_bytes <= limit:
        return build_plan(request, "auto", {}, request.plain)
    request.require_feasible()
    search = Search(request)
    is_few = request.is_provisional or request.problem.num_rows > _MANY_ROWS
    search.try_(request.problem.codes(request.floor_actions))
    for order in families(request, few=is_few):
        if search.is_over:
            break
        shortest_prefix(search, order)
    if request.is_provisional:
        return _plan(request, search.best, None)
    effort = _Effort(search)
    if len(request.problem.candidates) <= MAX_ITEMS:
        for codes, rest in roundings(request):
            if search.is_over:
                break
            before = search.best
            found = _filled(search, codes, rest)
            effort.round(*_FIRST, found if effort.has_begun or found is search.best else before)
            if search.is_within(_CLOSE):
                break
    rival = _best_policy(search)
    effort.rounds()
    return _plan(request, search.best, rival)


def _plan(request: PlanRequest, best: Choice | None, rival: MemoryPlan | None) -> MemoryPlan:
    """The fastest of the best choice, the best policy's plan, and the floor's."""
    seconds = best.seconds if best is not None else request.floor.step_seconds
    if rival is not None and rival.predicted_step_seconds < seconds:
        return dataclasses.replace(rival, policy="auto")
    if best is None or seconds > request.floor.step_seconds:
        return build_plan(request, "auto", request.floor_actions, request.floor)
    return written(request, best)


def _best_policy(search: Search) -> MemoryPlan | None:
    """The fastest plan of a published policy; their choices are tried with schedules of our own as well."""
    is_large = search.request.problem.num_rows > _MANY_ROWS
    request = search.request.trying(_FEW_PREFIXES if is_large else _MAX_PREFIXES)
    plans = []
    bounds = {action: request.bound_of(action) for action in sorted(set(ONLY.values()))}
    for name, policy in PUBLISHED.items():
        if search.is_over:
            break
        if name in _SLOW and (is_large or search.is_within(_SLOW[name])):
            continue
        if search.best is not None and name in ONLY and bounds[ONLY[name]] > search.best.seconds:
            continue
        try:
            plan = policy(request)
        except BudgetInfeasibleError:
            continue
        plans.append(plan)
        actions, no_memo = choice_of(plan.decisions)
        search.try_(request.problem.codes(actions), request.problem.flags(no_memo))
    return min(plans, key=lambda plan: plan.predicted_step_seconds, default=None)


def shortest_prefix(
    search: Search, order: Order, codes: Codes | None = None, *, guess: int | None = None
) -> Choice | None:
    """What the shortest feasible prefix of an order comes to, beside other actions.

    Args:
        search: Simulates choices.
        order: The actions, in the order in which they are taken.
        codes: The other actions.
        guess: How many it will take; a good one spares simulations.
    """
    problem = search.request.problem
    base = np.zeros(len(problem.candidates), dtype=np.int8) if codes is None else codes
    numbers = np.array([problem.number[s] for s, _ in order], dtype=np.int64)
    actions = problem.codes(dict(order))[numbers] if order else np.zeros(0, dtype=np.int8)

    def prefix(length: int) -> Choice | None:
        tried = base.copy()
        tried[numbers[:length]] = actions[:length]
        choice = search.try_(tried)
        return choice if choice.is_feasible else None

    return first_that_fits(0, len(order), prefix, lambda: search.is_over, guess=guess)


def first_that_fits(
    low: int,
    high: int,
    try_: Callable[[int], _T | None],
    is_over: Callable[[], bool] = lambda: False,
    *,
    guess: int | None = None,
) -> _T | None:
    """What the shortest prefix gives that fits, by bisection; longer ones need not, since replays take memory too.

    Args:
        low: The least length.
        high: The greatest, which is tried first where there is no guess.
        try_: Gives what a prefix of a length comes to; None where it does not fit.
        is_over: Whether to stop, with the best so far.
        guess: A length from which the search widens in steps that double.
    """
    if guess is None:
        best = try_(high)
    else:
        low, high, best = _around(min(max(guess, low), high), low, high, try_, is_over)
    while low < high and not is_over():
        middle = (low + high) // 2
        found = try_(middle)
        if found is not None:
            best, high = found, middle
        else:
            low = middle + 1
    return best


def _around(
    length: int, low: int, high: int, try_: Callable[[int], _T | None], is_over: Callable[[], bool]
) -> tuple[int, int, _T | None]:
    """Between which lengths the shortest one is that fits, and what the upper one gives, from near a length."""
    best, step = try_(length), 1
    if best is not None:
        high = length
        while low < high and not is_over():
            length = max(low, high - step)
            found = try_(length)
            if found is None:
                return length + 1, high, best
            best, high, step = found, length, 2 * step
        return low, high, best
    while best is None and length < high and not is_over():
        low, length = length + 1, min(high, length + step)
        best, step = try_(length), 2 * step
    return low, length, best


def _filled(search: Search, codes: Codes, rest: Order) -> Choice | None:
    """A choice with the shortest prefix of an order beside it that makes it fit."""
    choice = search.try_(codes)
    return choice if choice.is_feasible else shortest_prefix(search, rest, codes)


class _Effort:
    """Improves the best choice in rounds, each longer than the one before, while the gap to the bound is worth it.

    Args:
        search: Knows the best choice.
    """

    def __init__(self, search: Search) -> None:
        self._search = search
        self._local = LocalSearch(search)
        self._num_rounds = 0
        num_rows = max(1, search.request.problem.num_rows)
        self._num_left = _max_rows(num_rows) // num_rows

    @property
    def has_begun(self) -> bool:
        """Whether there was a round."""
        return self._num_rounds > 0

    def round(self, gap: float, trials: int, start: Choice | None = None) -> bool:
        """Improve the best choice, or another one, if the best is not within a gap; whether anything was tried."""
        search, request = self._search, self._search.request
        start = start or search.best
        num_trials = max(_MIN_TRIALS, trials * len(request.problem.candidates))
        if request.seconds is None:
            num_trials = min(num_trials, self._num_left)
        if start is None or num_trials <= 0 or search.is_over or search.is_within(gap):
            return False
        before = search.num_trials
        self._local.improve(start, num_trials, seed=request.seed + self._num_rounds)
        self._num_rounds += 1
        self._num_left -= search.num_trials - before
        return search.num_trials > before

    def rounds(self) -> None:
        """Go on from the best choice while that gains; without end where a time limit sets one.

        Where the gap stays, go from the floor's choice, too: no small changes may lead from here to the best.
        """
        request = self._search.request
        for gap, trials in _ROUNDS:
            before = self._search.gap
            self.round(gap, trials)
            if self._search.gap > (1 - _LEAST_GAIN) * before:
                break
        if len(request.problem.candidates) <= _FEW_CANDIDATES:
            floor = self._search.try_(request.problem.codes(request.floor_actions))
            for _ in range(_MOST_ANEW if floor.is_feasible else 0):
                if self.round(*_ANEW, floor):
                    self.round(*_FIRST)
        while request.seconds is not None and self.round(_OPTIMAL, _ROUNDS[-1][1]):
            pass


def _max_rows(num_rows: int) -> int:
    if not is_compilable():
        return _MAX_PLAIN_ROWS
    return _MAX_ROWS if num_rows <= _MANY_ROWS else _MAX_ROWS // 4  # where all else takes long, too
