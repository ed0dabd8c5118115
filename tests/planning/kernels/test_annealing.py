"""Small changes of a choice, and the search that makes them: in both forms the same."""

from __future__ import annotations

import functools
import importlib.util
import random
from typing import Any
from unittest import mock

import numpy.typing as npt
import pytest
from hypothesis import assume, event, given, settings

from lightning_offload.graph import DeviceSpec, StepGraph
from lightning_offload.planning.annealing import LocalSearch
from lightning_offload.planning.arrays import KEEP, RECOMPUTE, SWAP
from lightning_offload.planning.kernels import PLAIN, Kernels, annealing, compiled
from lightning_offload.planning.kernels.annealing import (
    ANEW,
    MAX_DRAWS,
    NEIGHBOURHOOD,
    NUM_STATES,
    allows,
    key_after,
    near,
    propose,
)
from lightning_offload.planning.kernels.buffers import Moves
from lightning_offload.planning.kernels.simulation import NEVER
from lightning_offload.planning.problem import Problem
from lightning_offload.planning.request import PlanRequest
from lightning_offload.planning.search import Search
from lightning_offload.planning.simulator import Simulator
from tests.graph.building import step_graphs, tiered_devices
from tests.planning.step_strategies import SEEDS, odd_steps
from tests.shares import examples

HAS_NUMBA = importlib.util.find_spec("numba") is not None


def some_moves(rng: random.Random) -> Moves:
    """Of some candidates, each with some of the actions, of few sizes."""
    count = rng.randint(1, 30)
    can_swap, can_recompute = ([int(rng.random() < 0.6) for _ in range(count)] for _ in range(2))
    can_swap[rng.randrange(count)] = 1
    movable = [s for s in range(count) if can_swap[s] or can_recompute[s]]
    sizes = [rng.randint(1, 3) for _ in movable]
    alike = sorted(range(len(movable)), key=lambda place: sizes[place])
    ordered = [sizes[place] for place in alike]
    begin = [ordered.index(size) for size in sizes]
    end = [first + ordered.count(size) for first, size in zip(begin, sizes, strict=True)]
    return Moves(movable, can_swap, can_recompute, alike, begin, end)


@settings(max_examples=examples(300))
@given(seed=SEEDS)
def test_changes_are_allowed_and_can_be_undone(seed: int) -> None:
    """One or two other states, the key follows them, and all that was changed is told."""
    rng = random.Random(seed)
    moves = some_moves(rng)
    count = len(moves.can_swap)
    marks = [rng.getrandbits(60) for _ in range(NUM_STATES * count)]
    options = [[state for state in range(NUM_STATES) if allows(moves, s, state)] for s in range(count)]
    states = [rng.choice(options[s]) for s in range(count)]
    before, changed, draws = list(states), [0] * 4, [rng.random() for _ in range(MAX_DRAWS)]
    at = propose(moves, states, draws, 0, changed)
    assert 0 < at < MAX_DRAWS  # one is left to accept by
    assert all(state in options[s] for s, state in enumerate(states))
    told = {changed[n]: changed[n + 1] for n in (0, 2) if changed[n] >= 0}
    assert {s: before[s] for s in range(count) if states[s] != before[s]} == told
    assert 1 <= len(told) <= 2

    def key(of: list[int]) -> int:
        return functools.reduce(int.__xor__, (marks[NUM_STATES * s + state] for s, state in enumerate(of)))

    assert key_after(marks, key(before), states, changed) == key(states)


def test_what_a_candidate_may_be() -> None:
    """Keeping is always possible; recomputing comes in two kinds."""
    moves = Moves([0, 1], [1, 0], [0, 1], [0, 1], [0, 1], [1, 2])
    assert [[allows(moves, s, state) for state in (KEEP, SWAP, RECOMPUTE, ANEW)] for s in (0, 1)] == [
        [True, True, False, False], [True, False, True, True],
    ]  # fmt: skip


def test_neighbours_are_near_and_others() -> None:
    """On either side alike, cut off at the ends."""
    draws = [(n + 0.5) / (2 * NEIGHBOURHOOD) for n in range(2 * NEIGHBOURHOOD)]
    assert [near(100, 50, draw) - 50 for draw in draws] == [*range(-NEIGHBOURHOOD, 0), *range(1, NEIGHBOURHOOD + 1)]
    assert {near(100, 0, draw) for draw in draws} == {0, *range(1, NEIGHBOURHOOD + 1)}
    assert {near(2, 1, draw) for draw in draws} == {0, 1}


class Ran:
    """A local search from the floor's choice, in one form."""

    def __init__(self, problem: Problem, device: DeviceSpec, budget_bytes: int, kernels: Kernels) -> None:
        self.request = PlanRequest(problem, device, budget_bytes)
        self.request.__dict__["simulator"] = Simulator(problem, device, budget_bytes, kernels=kernels)
        self.search = Search(self.request)
        self.start = self.search.try_(problem.codes(self.request.floor_actions))
        self.calls: list[npt.NDArray[Any]] = []

    def improve(self, num_trials: int, seed: int) -> tuple[Any, ...]:
        """What it came to."""
        LocalSearch(self.search).improve(self.start, num_trials, seed=seed)
        best = self.search.best
        assert best is not None
        return (best.codes.tolist(), best.no_memo.tolist(), best.outcome, self.search.num_trials)


def two_from_the_floor(
    graph: StepGraph, device: DeviceSpec, seed: int, forms: tuple[Kernels, Kernels]
) -> tuple[Ran, Ran]:
    """Two searches under one budget, drawn between the floor and the plain peak, from a choice that fits."""
    problem, rng = Problem(graph), random.Random(seed)
    free = PlanRequest(problem, device, None)
    assume(free.floor.peak_bytes < free.plain.peak_bytes)
    budget = rng.randint(free.floor.peak_bytes, free.plain.peak_bytes - 1)
    one, other = (Ran(problem, device, budget, kernels) for kernels in forms)
    assume(one.start.is_feasible)
    return one, other


@pytest.mark.skipif(not HAS_NUMBA, reason="numba is not installed")
@settings(max_examples=examples(30))
@given(
    graph=odd_steps() | step_graphs(max_saves=8, max_ops=14, unit=1000), device=tiered_devices(unit=1000), seed=SEEDS
)
def test_both_forms_search_alike(graph: StepGraph, device: DeviceSpec, seed: int) -> None:
    """To the bit, for any step, budget and tiers; and the best is a choice that fits."""
    loops = compiled()
    assert loops is not None
    plain, other = two_from_the_floor(graph, device, seed, (PLAIN, loops))
    assert plain.improve(100, seed) == other.improve(100, seed)
    best = plain.search.best
    assert best is not None
    assert best.is_feasible
    assert best.seconds <= plain.start.seconds
    assert best.outcome == plain.request.simulator.run(best.codes, best.no_memo)


@settings(max_examples=examples(100))
@given(
    graph=odd_steps() | step_graphs(max_saves=8, max_ops=14, unit=1000), device=tiered_devices(unit=1000), seed=SEEDS
)
def test_what_is_given_up_costs_at_least_as_much(graph: StepGraph, device: DeviceSpec, seed: int) -> None:
    """Whatever is useless, a search finds what it finds with nothing given up; no choice costs less than was said."""
    whole, ran = two_from_the_floor(graph, device, seed, (PLAIN, PLAIN))
    price, num_given_up = annealing.price, 0

    def in_full(*args: Any) -> tuple[float, bool, bool]:
        return price(*args[:-1], NEVER)

    def checked(*args: Any) -> tuple[float, bool, bool]:
        nonlocal num_given_up
        cost, is_exact, fits = price(*args)
        in_truth, _, truly_fits = in_full(*args)
        if is_exact:
            assert (cost, fits) == (in_truth, truly_fits)
        else:
            num_given_up += 1
            assert args[-1] < cost <= in_truth
        return cost, is_exact, fits

    with mock.patch.object(annealing, "price", in_full):
        expected = whole.improve(100, seed)
    with mock.patch.object(annealing, "price", checked):
        assert ran.improve(100, seed) == expected
    event(f"given up: {min(num_given_up, 1)}")


def test_what_was_seen_is_not_simulated_again() -> None:
    """Of two candidates there are sixteen states at most, however many trials are allowed."""
    from tests.graph.building import DEVICE, chain

    problem = Problem(chain(1000, 2000))
    free = PlanRequest(problem, DEVICE, None)
    ran = Ran(problem, DEVICE, (free.floor.peak_bytes + free.plain.peak_bytes) // 2, PLAIN)
    _, _, outcome, num_trials = ran.improve(1000, 0)
    assert num_trials <= NUM_STATES**2 + 2  # and the start, and the best once more
    assert outcome.step_seconds <= ran.start.seconds
