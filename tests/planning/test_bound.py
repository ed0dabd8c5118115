"""The lower bound on the step time, by hand."""

from __future__ import annotations

import dataclasses

import pytest

from lightning_offload.planning.bound import bound_seconds, cheapest_seconds
from lightning_offload.planning.problem import Problem
from lightning_offload.planning.simulator import simulate
from tests.graph.building import DEVICE, GraphBuilder, chain

SHARED = dataclasses.replace(DEVICE, copy_interference=0.5)


def test_bound_without_need_is_the_plain_time() -> None:
    """Where everything fits, the bound is the time with everything kept, and is met."""
    problem = Problem(chain(20, 30, 40))
    assert bound_seconds(problem, SHARED, None) == 6.0
    assert bound_seconds(problem, SHARED, 200) == 6.0


def test_excess_is_paid_at_the_cheapest_price() -> None:
    """Twenty bytes too much cost the compute that their copies take: 0.4 s of lanes at half a core."""
    problem = Problem(chain(20, 30, 40))  # away at the peak of 200 bytes: 20 and 30
    assert bound_seconds(problem, SHARED, 180) == pytest.approx(6.0 + 20 * 0.02 * 0.5)


def test_cheapest_is_the_lesser_of_copy_and_replay() -> None:
    """An op of 1 ms is cheaper than copies; shared among two results it counts by bytes."""
    b = GraphBuilder()
    first, second = b.op((b.given(1),), (30, 10), seconds=0.001)
    b.pack(first)
    b.pack(second)
    problem = Problem(b.build())
    assert cheapest_seconds(problem, problem.candidates[1], SHARED) == pytest.approx(0.00075)
    assert cheapest_seconds(problem, problem.candidates[2], SHARED) == pytest.approx(0.00025)


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
    timeline = simulate(problem, {1: action}, SHARED, overlap=False)  # type: ignore[dict-item]
    assert timeline.peak_bytes == 101
    assert bound_seconds(problem, SHARED, 101) <= timeline.step_seconds
