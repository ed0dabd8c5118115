"""The cheaper bound, by hand."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lightning_offload.graph import Action, DeviceSpec, StepGraph
from lightning_offload.planning.problem import Problem
from lightning_offload.planning.relaxation import bound_of_action
from lightning_offload.planning.relaxation.facts import Case
from lightning_offload.planning.relaxation.knapsack import knapsack
from lightning_offload.planning.simulator import ON_DEMAND, simulate
from tests.graph.building import DEVICE, GraphBuilder, chain, deep_chains, step_graphs, tiered_devices

SHARED = dataclasses.replace(DEVICE, copy_interference=0.5)


def test_excess_is_paid_at_the_cheapest_price() -> None:
    """Twenty bytes too much cost the compute that their copies take: 0.4 s of lanes at half a core."""
    problem = Problem(chain(20, 30, 40))  # away at the peak of 200 bytes: 20 and 30
    seconds, swap, recompute = knapsack(_case(problem, SHARED, 180))
    assert seconds == pytest.approx(6.0 + 20 * 0.02 * 0.5)
    assert swap == {1: 1.0}
    assert recompute == {}


def test_what_several_replays_run_is_shared_by_bytes() -> None:
    """Two results of a lost one: its op's time is shared among both, beside their own."""
    b = GraphBuilder()
    lost = b.make(60, b.given(1), seconds=0.4)
    packs = [b.pack(b.make(num_bytes, lost, seconds=seconds)) for num_bytes, seconds in ((30, 0.1), (10, 0.1))]
    b.drop(lost)
    b.drop(2, 3)
    large = b.make(200)
    b.drop(large)
    for pack in reversed(packs):
        b.unpack(pack)
        b.op()
        b.release(pack)
    problem = Problem(b.build())
    plain = simulate(problem, {}, DEVICE)
    for excess, expected in ((10, 10 * (0.1 / 30 + 0.4 / 40)), (40, 0.1 + 0.1 + 0.4)):
        found = bound_of_action(problem, DEVICE, plain, plain.peak_bytes - excess, "recompute")
        assert found - plain.step_seconds == pytest.approx(expected)
    assert bound_of_action(problem, DEVICE, plain, plain.peak_bytes - 41, "recompute") == math.inf


def test_what_is_swapped_goes_out_before_the_peak_and_comes_back_after_it() -> None:
    """Fifty bytes at a hundred a second each way, though compute takes a twentieth of that."""
    graph = chain(20, 30, 40)
    graph = dataclasses.replace(graph, ops=tuple(dataclasses.replace(op, seconds=0.01) for op in graph.ops))
    problem = Problem(graph)
    plain = simulate(problem, {}, DEVICE)
    starts = np.concatenate(([0.0], np.cumsum(problem.seconds)))
    before = starts[min(problem.candidates[s].pack_tick for s in (1, 2))]
    found = bound_of_action(problem, DEVICE, plain, plain.peak_bytes - 50, "swap")
    assert found >= before + 1.0
    assert found <= simulate(problem, {1: "swap", 2: "swap"}, DEVICE).step_seconds
    assert bound_of_action(problem, DEVICE, plain, plain.peak_bytes - 51, "swap") == math.inf
    assert bound_of_action(problem, DEVICE, plain, plain.peak_bytes, "swap") == plain.step_seconds


@settings(max_examples=150)
@given(
    graph=step_graphs(max_ops=14, max_saves=12) | deep_chains(),
    device=tiered_devices(),
    action=st.sampled_from(["swap", "recompute"]),
    data=st.data(),
)
def test_no_plan_of_one_action_is_below_its_bound(
    graph: StepGraph, device: DeviceSpec, action: Action, data: st.DataObject
) -> None:
    """Whatever takes it, whatever is memoised, and whether copies overlap compute."""
    problem = Problem(graph)
    can = [s for s, c in problem.candidates.items() if (c.can_swap if action == "swap" else c.can_recompute)]
    assume(can)
    chosen = data.draw(st.lists(st.sampled_from(can), unique=True, min_size=1))
    no_memo = (
        frozenset(data.draw(st.lists(st.sampled_from(chosen), unique=True))) if action == "recompute" else frozenset()
    )
    schedule = data.draw(st.sampled_from([None, ON_DEMAND]))
    made = simulate(problem, dict.fromkeys(chosen, action), device, no_memo=no_memo, schedule=schedule)
    assume(made.overflow_bytes == 0)
    plain = simulate(problem, {}, device)
    bound = bound_of_action(problem, device, plain, made.peak_bytes, action)
    assert bound <= made.step_seconds * (1 + 1e-9)
    assert bound >= plain.step_seconds


def _case(problem: Problem, device: DeviceSpec, budget_bytes: int) -> Case:
    return Case.of(problem, device, simulate(problem, {}, device), budget_bytes)
