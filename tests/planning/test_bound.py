"""The lower bound on the step time: by hand, and against plans of all policies."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_offload.errors import BudgetInfeasibleError
from lightning_offload.graph import DeviceSpec, StepGraph
from lightning_offload.planning.planner import POLICIES, plan
from lightning_offload.planning.problem import Problem
from lightning_offload.planning.relaxation import relax
from lightning_offload.planning.request import PlanRequest
from lightning_offload.planning.simulator import ON_DEMAND, simulate
from tests.graph.building import DEVICE, GraphBuilder, chain, step_graphs, tiered_devices

SHARED = dataclasses.replace(DEVICE, copy_interference=0.5)


def test_bound_without_need_is_the_plain_time() -> None:
    """Where everything fits, the bound is the time with everything kept, and is met."""
    problem = Problem(chain(20, 30, 40))
    assert relax(problem, SHARED, None).seconds == 6.0
    assert relax(problem, SHARED, 200).seconds == 6.0


def test_excess_is_paid_at_the_cheapest_price() -> None:
    """Twenty bytes too much cost the compute that their copies take: 0.4 s of lanes at half a core."""
    problem = Problem(chain(20, 30, 40))  # away at the peak of 200 bytes: 20 and 30
    assert relax(problem, SHARED, 180).seconds == pytest.approx(6.0 + 20 * 0.02 * 0.5)


def _saved_and_never_read() -> Problem:
    b = GraphBuilder()
    unread = b.make(100, b.given(1))
    first = b.pack(unread)
    b.drop(unread)
    b.op()
    large = b.make(50)
    b.drop(large)
    b.op()
    b.release(first)
    b.op()
    return Problem(b.build())


@pytest.mark.parametrize("action", ["swap", "recompute"])
def test_bound_allows_for_saves_that_are_never_read(action: str) -> None:
    """What autograd saves and drops unread is never copied back nor replayed, which costs less."""
    problem = _saved_and_never_read()
    timeline = simulate(problem, {1: action}, SHARED, schedule=ON_DEMAND)  # type: ignore[dict-item]
    assert timeline.peak_bytes == 101
    assert relax(problem, SHARED, 101).seconds <= timeline.step_seconds


@settings(max_examples=30)
@given(graph=step_graphs(), device=tiered_devices())
def test_a_larger_budget_never_costs_more(graph: StepGraph, device: DeviceSpec) -> None:
    """The bound does not rise with the budget, ends at the plain time, and is never below that."""
    problem = Problem(graph)
    request = PlanRequest(problem, device, None)
    low, high = request.floor.peak_bytes, request.plain.peak_bytes
    budgets = [int(low + share * (high - low)) for share in (0, 0.1, 0.3, 0.6, 0.9, 1)]
    bounds = [relax(problem, device, budget).seconds for budget in budgets]
    assert all(later <= earlier * (1 + 1e-7) for earlier, later in itertools.pairwise(bounds))
    assert bounds[-1] == relax(problem, device, None).seconds == request.plain.step_seconds


@settings(max_examples=3)
@given(graph=step_graphs(max_saves=4), device=tiered_devices(), height=st.sampled_from([0.1, 0.5, 0.9]))
def test_no_policy_is_below_the_bound(graph: StepGraph, device: DeviceSpec, height: float) -> None:
    """Whoever plans, the step takes at least the bound of the plan's own peak."""
    problem = Problem(graph)
    request = PlanRequest(problem, device, None)
    low, high = request.floor.peak_bytes, request.plain.peak_bytes
    for name in POLICIES:
        try:
            made = plan(graph, device, int(low + height * (high - low)), policy=name)
        except BudgetInfeasibleError:
            continue
        bound = relax(problem, device, made.predicted_peak_bytes).seconds
        assert bound <= made.predicted_step_seconds * (1 + 1e-9), name
        assert made.bound_seconds <= made.predicted_step_seconds * (1 + 1e-9), name
