"""Steps of sizes that were not recorded are planned as if they had been, in less time."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_offload.errors import BudgetInfeasibleError
from lightning_offload.graph.step_graph import StepGraph
from lightning_offload.planning import kernels
from lightning_offload.planning.family import FamilyPlanner
from lightning_offload.planning.planner import plan_with_margin
from lightning_offload.planning.problem import Problem, min_bytes
from lightning_offload.planning.request import PlanRequest
from lightning_offload.planning.step_model import StepModel
from tests.graph.building import GraphBuilder
from tests.planning.step_strategies import SEEDS, odd_step
from tests.shares import pairs
from tests.tuning.steps import A100, linear_family, recorded_family, untimed


def _budget(model: StepModel, n: int, height: float) -> int:
    """From the smallest that a family's planner can meet (0) to the plain peak (1)."""
    figures = model.figures_at((n,))
    smallest = min_bytes(model.structure) // 4
    problem = Problem(model.structure, smallest=smallest)
    request = PlanRequest(problem.resized(model.sized(figures), figures.workspace_bytes, figures.seconds), A100, None)
    floor, plain = request.floor.peak_bytes, request.plain.peak_bytes
    return int(floor + height * (plain - floor))


def _model(name: str) -> StepModel:
    family = recorded_family(name)
    return StepModel.fit({(n,): family(n) for n in (2, 4, 8)})


@given(SEEDS, st.integers(2, 500))
def test_a_resized_problem_is_the_one_that_would_be_made(seed: int, n: int) -> None:
    """Columns, candidates and memory are those of a problem made of the predicted graph."""
    rng = random.Random(seed)
    family = linear_family(odd_step(rng), rng)
    model = StepModel.fit({(size,): family(size) for size in (2, 5, 9)})
    figures = model.figures_at((n,))
    resized = Problem(model.structure).resized(model.sized(figures), figures.workspace_bytes, figures.seconds)
    made = Problem(model.at((n,)), frozenset(set(range(len(model.structure.storages))) - set(resized.candidates)))
    assert np.array_equal(resized.base, made.base) or set(made.candidates) != set(resized.candidates)
    assert np.allclose(resized.seconds, made.seconds)
    if set(made.candidates) == set(resized.candidates):
        for mine, others in zip(resized.arrays, made.arrays, strict=True):
            assert np.allclose(mine, others)
        assert resized.plain_seconds == pytest.approx(made.plain_seconds)
        assert [c.num_bytes for c in resized.candidates.values()] == [c.num_bytes for c in made.candidates.values()]


@pytest.mark.parametrize(("name", "height"), pairs(["gpt2-sdpa", "vgg16-bn"], [0.5, 0.2], every=2))
def test_plans_of_any_size_fit_and_are_close_to_those_that_take_long(name: str, height: float) -> None:
    """At sizes between and beyond the recorded ones, once one was searched for thoroughly."""
    model = _model(name)
    planner = FamilyPlanner(model)
    for n in (16, 12, 24):
        figures, budget = model.figures_at((n,)), _budget(model, n, height)
        quick = planner.plan(model.sized(figures), figures, A100, budget, is_thorough=n == 16)
        slow = plan_with_margin(model.at((n,)), A100, budget, usable_bytes=None, shortfall_bytes=0, must_fit=True)
        quick.check(model.at((n,)))
        assert quick.predicted_peak_bytes <= budget
        assert quick.plain_peak_bytes == slow.plain_peak_bytes
        assert quick.plain_step_seconds == pytest.approx(slow.plain_step_seconds)
        assert quick.predicted_step_seconds <= 1.06 * slow.predicted_step_seconds


def test_the_peak_under_a_plan_that_moves_what_is_kept_here() -> None:
    """What it says of them counts, though there is no choice about them: the plan is what runs."""
    model = _model("vgg16-bn")
    planner = FamilyPlanner(model)
    figures = model.figures_at((16,))
    graph = model.sized(figures)
    plan = planner.plan(graph, figures, A100, _budget(model, 16, 0.3), is_thorough=True)
    assert planner.peak_bytes(plan, graph, figures, A100) == plan.predicted_peak_bytes
    away = frozenset(d.storage for d in plan.decisions if d.action != "keep")
    assert away
    assert (
        planner.keeping(away).peak_bytes(plan, graph, figures, A100)
        == plan.predicted_peak_bytes
        < plan.plain_peak_bytes
    )


def test_the_peak_under_a_policy_that_moves_what_is_small_at_large_sizes() -> None:
    """Where a large step has no choice about what does not grow, a small one has: policies plan that one by itself."""
    model = StepModel.fit({(n,): _one_of_constant_size(n) for n in (256, 512, 1024)})
    planner = FamilyPlanner(model)
    small, figures = model.at((2,)), model.figures_at((2,))
    plan = plan_with_margin(
        small, A100, 1 << 30, usable_bytes=None, shortfall_bytes=0, must_fit=True, policy="all-swap"
    )
    constant = next(i for i, storage in enumerate(small.storages) if storage.num_bytes == _CONSTANT_BYTES)
    assert min_bytes(model.structure) // 4 > _CONSTANT_BYTES
    assert constant in {d.storage for d in plan.decisions}
    assert planner.peak_bytes(plan, model.sized(figures), figures, A100) == plan.predicted_peak_bytes


_CONSTANT_BYTES = 200


def _one_of_constant_size(n: int) -> StepGraph:
    b = GraphBuilder()
    x, packs = b.given(n * 1000), []
    for num_bytes in (_CONSTANT_BYTES, n * 1000, n * 1000):
        y = b.make(num_bytes, x)
        packs.append(b.pack(y))
        b.drop(y)
    large = b.make(n * 3000)
    b.drop(large)
    for pack in reversed(packs):
        b.unpack(pack)
        b.op()
        b.release(pack)
    return b.build()


@pytest.mark.parametrize("name", ["resnet50", "gpt2-sdpa", "lstm"])
def test_without_a_search_and_at_any_height_plans_fit(name: str) -> None:
    """Down to the floor; what fits as it is is kept."""
    model = _model(name)
    planner = FamilyPlanner(model)
    for n in (3, 40):
        for height in (0.0, 0.3, 1.0):
            figures, budget = model.figures_at((n,)), _budget(model, n, height)
            made = planner.plan(model.sized(figures), figures, A100, budget)
            made.check(model.at((n,)))
            assert made.predicted_peak_bytes <= budget
            assert bool(made.decisions) == (height < 1.0 and made.plain_peak_bytes > budget)


def test_a_budget_below_the_floor_is_refused() -> None:
    """With the floor of that size, which then works."""
    model = _model("resnet50")
    planner, figures, floor = FamilyPlanner(model), model.figures_at((16,)), _budget(model, 16, 0.0)
    with pytest.raises(BudgetInfeasibleError, match=str(floor)):
        planner.plan(model.sized(figures), figures, A100, floor - 1)
    assert planner.plan(model.sized(figures), figures, A100, floor).predicted_peak_bytes == floor


def test_plans_that_a_step_waits_for_bring_no_compiler_nearer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling takes seconds, in the midst of a training: searches for plans of recorded steps pay for that."""
    model = _model("gpt2-sdpa")
    planner, figures, budget = FamilyPlanner(model), model.figures_at((12,)), _budget(model, 12, 0.3)
    monkeypatch.setattr(kernels, "_work", kernels._Work())
    planner.plan(model.sized(figures), figures, A100, budget)
    assert kernels._work.num_rows == 0
    planner.plan(model.sized(figures), figures, A100, budget, is_thorough=True)
    assert kernels._work.num_rows > 0


def test_what_must_stay_stays() -> None:
    """Storages to keep are no candidates at any size."""
    model = _model("resnet50")
    all_of_them = frozenset(Problem(model.structure).candidates)
    kept = frozenset(sorted(all_of_them)[::2])
    planner, figures = FamilyPlanner(model, kept), model.figures_at((16,))
    plain = PlanRequest(Problem(model.at((16,))), A100, None).plain.peak_bytes
    made = planner.plan(model.sized(figures), figures, A100, int(0.9 * plain))
    assert made.decisions
    assert kept.isdisjoint(d.storage for d in made.decisions)


def _two_lengths(batch: int, first: int, second: int) -> StepGraph:
    """An encoder and a decoder: products of the batch and either length, of both, and a strided one."""
    build = GraphBuilder()
    weight, x, y = build.given(4000), build.given(8 * batch * first), build.given(8 * batch * second)
    made = [build.make(64 * batch * first, x, weight, seconds=1e-6 * batch * first)]
    made.append(build.make(16 * batch * first * first, made[-1], seconds=1e-7 * batch * first * first))
    made.append(build.make(64 * batch * second + 256, y, weight, seconds=1e-6 * batch * second))
    made.append(build.make(16 * batch * first * second, *made[-2:], seconds=1e-7 * batch * first * second))
    made.append(build.make(32 * batch * -(-first // 2), made[-1], seconds=1e-6))
    saves = [build.pack(value) for value in made]
    build.drop(*made)
    build.backward()
    for save in reversed(saves):
        build.unpack(save)
        build.make(8, weight, seconds=1e-6)
        build.release(save)
    return build.build()


@given(st.integers(0, 10**6), st.tuples(st.integers(2, 8), st.integers(8, 600), st.integers(8, 600)))
def test_several_lengths_at_once(seed: int, at: tuple[int, int, int]) -> None:
    """Seven shapes in which three numbers vary are enough to predict sizes to the byte."""
    rng = random.Random(seed)
    lengths = rng.sample(range(16, 300), 14)
    points = [(rng.choice((2, 3, 5)), *pair) for pair in itertools.pairwise(lengths[::2])]
    points += [(batch, lengths[1], lengths[3]) for batch in (2, 3, 5)]
    model = StepModel.fit({point: _two_lengths(*point) for point in points})
    assert model.num_inexact == 0
    assert untimed(model.at(at)) == untimed(_two_lengths(*at))
