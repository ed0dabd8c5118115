"""Improves a choice by small changes: simulated annealing.

A change for the worse is accepted with a probability that falls with the harm and with the temperature, which falls
geometrically from a thousandth of the plain step's duration to a hundred-thousandth; cf. Kirkpatrick, Gelatt and
Vecchi, "Optimization by simulated annealing" (Science 220, 1983). Starting so cool keeps most of a good start. Changes
are one storage's action, or two storages' at once: what leaves the device makes room for what stays, so mostly
neighbours in the step are exchanged, now and then any two. That a recomputed storage stays for its later reads, or is
made again for each, counts as two actions: where room is short it decides whether anything can be recomputed at all.

The cost is the step's duration; for a choice that does not fit it is raised by a penalty in proportion to the excess,
so that the search may pass through such choices on its way to better ones. Where storages are large, few changes
lead from one that fits to another. Deterministic for a seed.
"""

from __future__ import annotations

import math
import random

import numpy as np

from lightning_offload.planning.arrays import KEEP, RECOMPUTE, SWAP, Codes
from lightning_offload.planning.plans import Setting
from lightning_offload.planning.problem import Problem
from lightning_offload.planning.search import Choice, Flags, Search

_FIRST, _LAST = 1e-3, 1e-5  # temperatures, in plain steps
_PENALTY = 10.0  # in plain steps, for exceeding the budget by all that the plain step does
_NEIGHBOURHOOD = 12
_SINGLE = 0.45  # share of changes of one storage
_NEARBY = 0.65  # share of exchanges that are between neighbours
_MAX_IDLE = 3  # proposals for each trial: many repeat others


def improve(search: Search, start: Choice, num_trials: int, *, seed: int = 0) -> Choice:
    """The best choice found from a feasible one.

    Args:
        search: Simulates choices.
        start: Where to begin.
        num_trials: Simulations to spend.
        seed: Of the random changes.
    """
    rng = random.Random(seed)
    moves = _Moves(search.setting.problem, rng)
    cost = _Cost(search.setting)
    current = best = start
    current_cost = cost(start)
    hot = _FIRST * search.setting.plain.step_seconds
    first = search.num_trials
    for _ in range(_MAX_IDLE * num_trials):
        done = (search.num_trials - first) / num_trials
        if search.is_over or done >= 1 or not moves.are_any:
            break
        choice = search.try_(*moves.changed(current.codes, current.no_memo))
        choice_cost = cost(choice)
        harm = choice_cost - current_cost
        if harm <= 0 or rng.random() < math.exp(-harm / (hot * (_LAST / _FIRST) ** done)):
            current, current_cost = choice, choice_cost
            if choice.is_feasible and choice.seconds < best.seconds:
                best = choice
    return best


class _Cost:
    """Duration, and a penalty for what does not fit."""

    def __init__(self, setting: Setting) -> None:
        assert setting.budget_bytes is not None
        self._limit = setting.budget_bytes
        excess = max(1, setting.plain.peak_bytes - self._limit)
        self._seconds_per_byte = _PENALTY * setting.plain.step_seconds / excess

    def __call__(self, choice: Choice) -> float:
        if choice.is_feasible:
            return choice.seconds
        excess = max(0, choice.outcome.peak_bytes - self._limit) + choice.outcome.overflow_bytes
        return choice.seconds + self._seconds_per_byte * excess


class _Moves:
    """Random changes of a choice."""

    def __init__(self, problem: Problem, rng: random.Random) -> None:
        self._rng = rng
        self._options: list[list[tuple[int, bool]]] = []  # by candidate: actions, and whether made for each read anew
        for c in problem.candidates.values():
            swap = [(SWAP, False)] if c.can_swap else []
            recompute = [(RECOMPUTE, False), (RECOMPUTE, True)] if c.can_recompute else []
            self._options.append([(KEEP, False), *swap, *recompute])
        self._movable = [i for i, options in enumerate(self._options) if len(options) > 1]

    @property
    def are_any(self) -> bool:
        """Whether anything can be changed."""
        return bool(self._movable)

    def changed(self, codes: Codes, no_memo: Flags) -> tuple[Codes, Flags]:
        """A copy with one or two other actions."""
        rng, movable = self._rng, self._movable
        codes, no_memo = np.array(codes), np.array(no_memo)
        place = rng.randrange(len(movable))
        self._change(codes, no_memo, movable[place])
        if rng.random() >= _SINGLE and len(movable) > 1:
            if rng.random() < _NEARBY:
                other = place + rng.choice((-1, 1)) * rng.randint(1, _NEIGHBOURHOOD)
                other = min(max(other, 0), len(movable) - 1)
            else:
                other = rng.randrange(len(movable))
            if other != place:
                self._change(codes, no_memo, movable[other])
        return codes, no_memo

    def _change(self, codes: Codes, no_memo: Flags, i: int) -> None:
        now = (int(codes[i]), bool(no_memo[i]))
        codes[i], no_memo[i] = self._rng.choice([option for option in self._options[i] if option != now])
