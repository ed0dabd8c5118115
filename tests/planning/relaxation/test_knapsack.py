"""The cheaper bound, by hand."""

from __future__ import annotations

import dataclasses

import pytest

from lightning_offload.planning.problem import Problem
from lightning_offload.planning.relaxation.facts import find_items
from lightning_offload.planning.relaxation.knapsack import knapsack, replay_seconds, swap_seconds
from lightning_offload.planning.simulator import simulate
from tests.graph.building import DEVICE, GraphBuilder, chain

SHARED = dataclasses.replace(DEVICE, copy_interference=0.5)


def test_excess_is_paid_at_the_cheapest_price() -> None:
    """Twenty bytes too much cost the compute that their copies take: 0.4 s of lanes at half a core."""
    problem = Problem(chain(20, 30, 40))  # away at the peak of 200 bytes: 20 and 30
    plain = simulate(problem, {}, SHARED)
    seconds, swap, recompute = knapsack(problem, SHARED, find_items(problem), plain, 180)
    assert seconds == pytest.approx(6.0 + 20 * 0.02 * 0.5)
    assert swap == {1: 1.0}
    assert recompute == {}


def test_prices() -> None:
    """Copies cost their share of compute; an op's time is shared among its results by bytes."""
    b = GraphBuilder()
    first, second = b.op((b.given(1),), (30, 10), seconds=0.001)
    b.pack(first)
    b.pack(second)
    problem = Problem(b.build())
    assert replay_seconds(problem, problem.candidates[1]) == pytest.approx(0.00075)
    assert replay_seconds(problem, problem.candidates[2]) == pytest.approx(0.00025)
    assert swap_seconds(problem.candidates[1], SHARED) == pytest.approx(0.3)
