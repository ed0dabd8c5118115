"""Improves a choice by small changes: late acceptance hill climbing.

A change is accepted where the cost is no more than it was some changes ago, so that the search crosses shallow valleys
and needs no temperature; cf. Burke and Bykov, "The late acceptance hill-climbing heuristic" (EJOR 258, 2017). Changes
are one storage's action, or two storages' at once: what leaves the device makes room for what stays, so mostly
neighbours in the step are exchanged, now and then any two.

The cost is the step's duration; for a choice that does not fit it is raised by a penalty in proportion to the excess,
so that the search may pass through such choices on its way to better ones. Where storages are large, few changes
lead from one that fits to another. Deterministic for a seed.
"""

from __future__ import annotations

import random
from typing import NamedTuple

import numpy as np

from lightning_offload.planning.arrays import KEEP, RECOMPUTE, SWAP, Codes
from lightning_offload.planning.plans import Setting
from lightning_offload.planning.problem import Problem
from lightning_offload.planning.search import Choice, Search

_NEIGHBOURHOOD = 12
_SINGLE = 0.45  # share of changes of one storage
_NEARBY = 0.65  # share of exchanges that are between neighbours
_MAX_IDLE = 3  # proposals for each trial: many repeat others


class Temper(NamedTuple):
    """How willing a search is to pass through worse choices.

    Attributes:
        penalty: Cost in steps' durations of exceeding the budget by all that the plain step does.
        history: Changes ago with which the cost is compared.
    """

    penalty: float
    history: int


BOLD = Temper(penalty=3.0, history=40)
PATIENT = Temper(penalty=10.0, history=200)


def improve(search: Search, start: Choice, num_trials: int, *, temper: Temper = BOLD, seed: int = 0) -> Choice:
    """The best choice found from a feasible one.

    Args:
        search: Simulates choices.
        start: Where to begin.
        num_trials: Simulations to spend.
        temper: How willing to pass through worse ones.
        seed: Of the random changes.
    """
    moves = _Moves(search.setting.problem, random.Random(seed))
    cost = _Cost(search.setting, temper.penalty)
    current = best = start
    current_cost = cost(start)
    history = [current_cost] * temper.history
    first = search.num_trials
    for k in range(_MAX_IDLE * num_trials):
        if search.is_over or search.num_trials - first >= num_trials or not moves.are_any:
            break
        choice = search.try_(moves.changed(current.codes), current.no_memo)
        choice_cost = cost(choice)
        if choice_cost <= max(current_cost, history[k % temper.history]):
            current, current_cost = choice, choice_cost
            if choice.is_feasible and choice.seconds < best.seconds:
                best = choice
        history[k % temper.history] = min(current_cost, history[k % temper.history])
    return best


class _Cost:
    """Duration, and a penalty for what does not fit."""

    def __init__(self, setting: Setting, penalty: float) -> None:
        assert setting.budget_bytes is not None
        self._limit = setting.budget_bytes
        excess = max(1, setting.plain.peak_bytes - self._limit)
        self._seconds_per_byte = penalty * setting.plain.step_seconds / excess

    def __call__(self, choice: Choice) -> float:
        if choice.is_feasible:
            return choice.seconds
        excess = max(0, choice.outcome.peak_bytes - self._limit) + choice.outcome.overflow_bytes
        return choice.seconds + self._seconds_per_byte * excess


class _Moves:
    """Random changes of a choice."""

    def __init__(self, problem: Problem, rng: random.Random) -> None:
        self._rng = rng
        self._options = [
            [KEEP, *([SWAP] if c.can_swap else []), *([RECOMPUTE] if c.can_recompute else [])]
            for c in problem.candidates.values()
        ]
        self._movable = [i for i, options in enumerate(self._options) if len(options) > 1]

    @property
    def are_any(self) -> bool:
        """Whether anything can be changed."""
        return bool(self._movable)

    def changed(self, codes: Codes) -> Codes:
        """A copy with one or two other actions."""
        rng, movable = self._rng, self._movable
        codes = np.array(codes)
        place = rng.randrange(len(movable))
        self._change(codes, movable[place])
        if rng.random() >= _SINGLE and len(movable) > 1:
            if rng.random() < _NEARBY:
                other = place + rng.choice((-1, 1)) * rng.randint(1, _NEIGHBOURHOOD)
                other = min(max(other, 0), len(movable) - 1)
            else:
                other = rng.randrange(len(movable))
            if other != place:
                self._change(codes, movable[other])
        return codes

    def _change(self, codes: Codes, i: int) -> None:
        codes[i] = self._rng.choice([code for code in self._options[i] if code != codes[i]])
