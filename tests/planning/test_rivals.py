"""No published policy's order, however far it is followed, is faster than the planner's own plan."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_offload.errors import BudgetInfeasibleError
from lightning_offload.graph import DeviceSpec, StepGraph
from lightning_offload.planning.planner import POLICIES, plan
from lightning_offload.planning.policies import ONLY
from lightning_offload.planning.policies.capuchin import eviction_order
from lightning_offload.planning.problem import Problem
from lightning_offload.planning.request import PlanRequest
from lightning_offload.planning.simulator import simulate
from tests.graph.building import DEVICE, chain, step_graphs, tiered_devices
from tests.shares import examples

AS_FAST = 1.001
RIVALS = [name for name in POLICIES if name != "auto"]
SLOW = dataclasses.replace(DEVICE, d2h_bytes_per_second=200.0, h2d_bytes_per_second=200.0, overhead_seconds=0.01)


@settings(max_examples=examples(40))
@given(graph=step_graphs(max_ops=14, max_saves=12), device=tiered_devices(), height=st.floats(0, 0.95))
def test_no_rival_is_faster(graph: StepGraph, device: DeviceSpec, height: float) -> None:
    """On steps of any form, with any tiers: each policy is fitted over all prefixes of its order."""
    _check(graph, device, height)


@settings(max_examples=5)
@given(
    sizes=st.lists(st.integers(20, 400), min_size=20, max_size=40),
    seconds=st.lists(st.sampled_from([0.01, 0.1, 0.5, 2.0]), min_size=1, max_size=7),
    height=st.sampled_from([0.05, 0.2, 0.5, 0.8]),
)
def test_no_rival_is_faster_on_longer_chains(sizes: list[int], seconds: list[float], height: float) -> None:
    """Where the planner tries only some of the prefixes itself."""
    graph = chain(*sizes)
    ops = tuple(dataclasses.replace(op, seconds=seconds[i % len(seconds)]) for i, op in enumerate(graph.ops))
    _check(dataclasses.replace(graph, ops=ops), SLOW, height)


def _check(graph: StepGraph, device: DeviceSpec, height: float) -> None:
    request = PlanRequest(Problem(graph), device, None)
    low, high = request.floor.peak_bytes, request.plain.peak_bytes
    budget = int(low + height * (high - low))
    ours = plan(graph, device, budget).predicted_step_seconds
    for name in RIVALS:
        try:
            theirs = plan(graph, device, budget, policy=name)
        except BudgetInfeasibleError:
            continue
        assert theirs.predicted_peak_bytes <= budget
        if name in ONLY:  # else what bounds it does not
            assert {decision.action for decision in theirs.decisions} <= {ONLY[name]}, name
        assert ours <= AS_FAST * theirs.predicted_step_seconds, name
    request = PlanRequest(Problem(graph), device, budget)
    order = eviction_order(request)
    for num in range(len(order) + 1):  # by a simulation of each, not by the policy's own fitting
        alone = simulate(request.problem, dict(order[:num]), device, limit_bytes=budget)
        if alone.peak_bytes <= budget and alone.overflow_bytes == 0:
            assert ours <= AS_FAST * alone.step_seconds, num


@pytest.mark.parametrize("policy", ["auto", "capuchin", "checkmate", "dtr", "pofo"])
def test_plans_are_the_same_each_time(policy: str) -> None:
    """Nothing depends on the clock: no limit in seconds decides a plan unless one is given."""
    graph = chain(*(50 + 37 * (i % 5) for i in range(30)))
    request = PlanRequest(Problem(graph), SLOW, None)
    budget = (request.floor.peak_bytes + request.plain.peak_bytes) // 2
    assert plan(graph, SLOW, budget, policy=policy) == plan(graph, SLOW, budget, policy=policy)
