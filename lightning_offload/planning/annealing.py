"""Improves a choice by small changes: simulated annealing.

A change for the worse is accepted with a probability that falls with the harm and with the temperature, which falls
geometrically to a two-hundred-thousandth of the plain step's duration; cf. Kirkpatrick, Gelatt and Vecchi,
"Optimization by simulated annealing" (Science 220, 1983). It starts at a hundredth of the gap to the lower bound.
Starting cool keeps most of a good start. From a thousandth of the plain step the same number of trials ends higher
where the gap is small (ResNet-152 on an A100, float32, h = 0.05: 1.3% above the bound, not 0.6%), and lower where it
is large (GPT-2 with eager attention, bfloat16, h = 0.2: 3.6%, not 4.2%).

Changes are one storage's action, or two storages' at once. What leaves the device makes room for what stays, so mostly
two storages exchange their actions: of the same size, wherever they are, since that fits again, or neighbours in the
step. That a recomputed storage stays for its later reads, or is made again for each, counts as two actions: where room
is short it decides whether anything can be recomputed at all.

The cost is the step's duration; for a choice that does not fit it is raised by a penalty in proportion to the excess,
so that the search may pass through such choices on its way to better ones. Where storages are large, few changes
lead from one that fits to another. Deterministic for a seed.

The loop itself is one of the kernels (:mod:`~lightning_offload.planning.kernels.annealing`): one trial takes a tenth of
a millisecond, no longer than Python takes to draw a change and to ask for it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lightning_offload.planning.arrays import RECOMPUTE, Codes
from lightning_offload.planning.kernels.annealing import (
    ANEW,
    BEST,
    MAX_DRAWS,
    NUM_DRAWN,
    NUM_PROPOSALS,
    NUM_STATES,
    NUM_TRIALS,
)
from lightning_offload.planning.kernels.buffers import Annealing, Moves, Seen
from lightning_offload.planning.problem import Problem
from lightning_offload.planning.request import PlanRequest
from lightning_offload.planning.search import HOPELESS, Choice, Flags, Search

_FIRST, _HOTTEST, _LAST = 1e-4, 2e-3, 5e-6  # temperatures, in plain steps
_SHARE = 0.01  # of the gap to the bound: the first temperature, within those limits
_PENALTY = 10.0  # in plain steps, for exceeding the budget by all that the plain step does
_MAX_IDLE = 3  # proposals for each trial: many repeat others
_NUM_SLOTS = 1 << 15  # for what was simulated before
_CHUNK = 64  # trials between two looks at the clock


class LocalSearch:
    """Improves choices of one search.

    Args:
        search: Knows the best choice so far, and is told of better ones.
    """

    def __init__(self, search: Search) -> None:
        self._search = search
        problem = search.request.problem
        marks = np.random.default_rng(0).integers(1 << 62, size=NUM_STATES * len(problem.candidates))
        self._moves = _moves(problem)
        self._seen = Seen(marks, np.full(_NUM_SLOTS, -1, dtype=np.int64), np.zeros(_NUM_SLOTS))

    def improve(self, start: Choice, num_trials: int, *, seed: int = 0) -> None:
        """Look for better choices around one.

        Args:
            start: Where to begin.
            num_trials: Simulations to spend.
            seed: Of the random changes.
        """
        search, simulator = self._search, self._search.request.simulator
        assert search.best is not None
        if len(self._moves.movable) == 0:
            return
        run, num_before = self._begun(start, search.best, num_trials), search.num_trials
        rng, draws = np.random.default_rng(seed), np.zeros(0)
        counts = run.counts
        while not search.is_over and counts[NUM_TRIALS] < num_trials and counts[NUM_PROPOSALS] < run.max_proposals:
            draws = draws[counts[NUM_DRAWN] :]
            if len(draws) < MAX_DRAWS * _CHUNK:
                draws = np.concatenate([draws, rng.random(MAX_DRAWS * _CHUNK)])
            simulator.anneal(self._moves, self._seen, run, draws, min(num_trials, int(counts[NUM_TRIALS]) + _CHUNK))
            search.num_trials = num_before + int(counts[NUM_TRIALS])
            if run.costs[BEST] < search.best.seconds:
                search.try_(*_codes(run.best))
                num_before += 1

    def _begun(self, start: Choice, best: Choice, num_trials: int) -> Annealing:
        """A search at its start."""
        request, states = self._search.request, _states(start)
        marks = self._seen.marks.reshape(-1, NUM_STATES)[np.arange(len(states)), states]
        first_share = min(max(_FIRST, _SHARE * self._search.gap), _HOTTEST)
        seconds_per_byte = _seconds_per_byte(request)
        return Annealing(
            states=states,
            best=_states(best),
            changed=np.full(4, -1, dtype=np.int64),
            counts=np.array([0, 0, 0, np.bitwise_xor.reduce(marks)], dtype=np.int64),
            costs=np.array([_cost(request, start, seconds_per_byte), best.seconds]),
            hot_seconds=first_share * request.plain.step_seconds,
            cooling=_LAST / first_share,
            max_trials=num_trials,
            max_proposals=_MAX_IDLE * num_trials,
            enough_seconds=self._search.enough_seconds,
            hopeless=HOPELESS,
            seconds_per_byte=seconds_per_byte,
            is_given=False,
        )


def _seconds_per_byte(request: PlanRequest) -> float:
    """The penalty for memory beyond the budget."""
    assert request.budget_bytes is not None
    return _PENALTY * request.plain.step_seconds / max(1, request.plain.peak_bytes - request.budget_bytes)


def _cost(request: PlanRequest, choice: Choice, seconds_per_byte: float) -> float:
    assert request.budget_bytes is not None
    excess = max(0, choice.outcome.peak_bytes - request.budget_bytes) + choice.outcome.overflow_bytes
    return choice.seconds + seconds_per_byte * excess


def _states(choice: Choice) -> npt.NDArray[np.int64]:
    return np.where(choice.no_memo & (choice.codes == RECOMPUTE), ANEW, choice.codes).astype(np.int64)


def _codes(states: npt.NDArray[np.int64]) -> tuple[Codes, Flags]:
    return np.minimum(states, RECOMPUTE).astype(np.int8), states == ANEW


def _moves(problem: Problem) -> Moves:
    candidates = list(problem.candidates.values())
    movable = [i for i, c in enumerate(candidates) if c.can_swap or c.can_recompute]
    sizes = np.array([candidates[i].num_bytes for i in movable], dtype=np.int64)
    alike = np.argsort(sizes, kind="stable")
    return Moves(
        movable=np.array(movable, dtype=np.int64),
        can_swap=np.array([c.can_swap for c in candidates], dtype=np.int64),
        can_recompute=np.array([c.can_recompute for c in candidates], dtype=np.int64),
        alike=alike,
        alike_begin=np.searchsorted(sizes[alike], sizes, side="left"),
        alike_end=np.searchsorted(sizes[alike], sizes, side="right"),
    )
