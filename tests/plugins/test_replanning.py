"""What measured steps showed of memory is put where it was seen."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest import mock

import pytest

from lightning_offload.graph import Decision
from lightning_offload.planning.planner import plan
from lightning_offload.planning.problem import Problem
from lightning_offload.planning.trace import simulate_plan
from lightning_offload.plugins import lifecycle
from lightning_offload.plugins.plan_entry import PlanEntry
from lightning_offload.plugins.plan_source import Imported, Recorded
from lightning_offload.plugins.replanning import Corrections, with_unforeseen
from lightning_offload.plugins.step_time_estimate import Halves, LaunchTimes
from lightning_offload.runtime.program import compile_plan
from tests.graph.building import DEVICE, chain

GRAPH = chain(100, 200, 300, 200)
PLAN = plan(GRAPH, DEVICE, None)


def _predicted() -> list[int]:
    """By op: the most since the op before."""
    problem = Problem(GRAPH)
    memory = simulate_plan(problem, PLAN.decisions, DEVICE).memory.tolist()
    begins = [0, *(tick + 1 for tick in problem.op_ticks.tolist())]
    return [max(memory[b : t + 1]) for b, t in zip(begins, problem.op_ticks.tolist(), strict=False)]


def test_what_was_foreseen_changes_nothing() -> None:
    """Measured as predicted, and below it."""
    predicted = _predicted()
    for measured in (predicted, [n - 50 for n in predicted]):
        assert with_unforeseen(GRAPH, PLAN, DEVICE, max(measured), measured) == (GRAPH, 0)


@pytest.mark.parametrize("at", range(len(GRAPH.ops)))
@pytest.mark.parametrize("more", [1, 70, 5000])
def test_more_than_was_foreseen_is_a_workspace_where_it_was(at: int, more: int) -> None:
    """Of that op alone; and then the peak is foreseen."""
    measured = _predicted()
    measured[at] += more
    graph, missing = with_unforeseen(GRAPH, PLAN, DEVICE, max(measured), measured)
    assert missing == 0
    assert [op.workspace_bytes for op in graph.ops] == [more if i == at else 0 for i in range(len(GRAPH.ops))]
    assert graph.digest() == GRAPH.digest()
    assert plan(graph, DEVICE, None).predicted_peak_bytes == max(PLAN.predicted_peak_bytes, measured[at])


@pytest.mark.parametrize("more", [0, 70])
def test_what_is_there_throughout_is_a_margin(more: int) -> None:
    """It is beside the step; one op's own is told from it."""
    measured = [n + 40 for n in _predicted()]
    at = measured.index(max(measured))
    measured[at] += more
    graph, missing = with_unforeseen(GRAPH, PLAN, DEVICE, max(measured), measured)
    assert missing == 40
    assert [op.workspace_bytes for op in graph.ops] == [more if i == at else 0 for i in range(len(GRAPH.ops))]


def test_a_peak_that_no_op_shows_is_a_margin() -> None:
    """So is one of a step that ran another number of ops, of which nothing is known op by op."""
    predicted = _predicted()
    peak_bytes = PLAN.predicted_peak_bytes + 123
    assert with_unforeseen(GRAPH, PLAN, DEVICE, peak_bytes, predicted) == (GRAPH, 123)
    assert with_unforeseen(GRAPH, PLAN, DEVICE, peak_bytes, predicted[1:]) == (GRAPH, 123)
    no_ops = dataclasses.replace(GRAPH, ops=(), values=(), saves=(), storages=())
    assert with_unforeseen(no_ops, dataclasses.replace(PLAN, decisions=()), DEVICE, 5, [])[0] == no_ops


RECOMPUTING = dataclasses.replace(PLAN, decisions=(Decision(storage=1, action="recompute"),))


def test_a_mode_that_costs_more_than_thought_has_a_plan_made_again() -> None:
    """When two steps in a row have shown it, and no more often than that is news."""
    corrections, wait = Corrections(), PLAN.predicted_step_seconds
    assert [corrections.by_mode(RECOMPUTING, DEVICE, seconds) for seconds in (wait, 0.001 * wait, wait)] == [False] * 3
    assert corrections.by_mode(RECOMPUTING, DEVICE, 0.5 * wait)
    assert corrections.mode_seconds == 0.5 * wait
    corrections.begin_plan()
    for seconds in (0.5 * wait, 0.54 * wait):
        assert not corrections.by_mode(RECOMPUTING, DEVICE, seconds)
    assert corrections.by_mode(RECOMPUTING, DEVICE, 0.6 * wait) is False  # 0.54 lasts, which is not much more than 0.5
    for _ in range(4):
        corrections.begin_plan()
        corrections.by_mode(RECOMPUTING, DEVICE, 100 * wait * (1 + (corrections.mode_seconds or 0.0)))
        corrections.by_mode(RECOMPUTING, DEVICE, 100 * wait * (1 + (corrections.mode_seconds or 0.0)))
    assert corrections.num_timed == 3


def test_a_plan_is_not_made_again_where_its_bytes_alone_would_take_longer() -> None:
    """All that is beyond the budget would have to be copied there and back."""
    above = dataclasses.replace(RECOMPUTING, budget_bytes=RECOMPUTING.plain_peak_bytes - 100)
    slow = dataclasses.replace(DEVICE, d2h_bytes_per_second=1.0, h2d_bytes_per_second=2.0)
    worth = 150.0 - above.predicted_step_seconds
    assert worth > 100
    for waited, is_made_again in ((worth - 1, False), (worth + 1, True)):
        corrections = Corrections()
        assert [corrections.by_mode(above, slow, waited) for _ in range(2)] == [False, is_made_again]


def test_a_plan_without_a_mode_is_not_made_again_for_it() -> None:
    """The host may be slow there too, but not by the mode."""
    corrections = Corrections()
    assert not any(corrections.by_mode(PLAN, DEVICE, PLAN.predicted_step_seconds) for _ in range(3))


def test_waits_for_the_host_are_not_blamed_on_ops() -> None:
    """A step twice as long has its ops' durations doubled, unless the device waited for the host for half of it."""
    device = dataclasses.replace(DEVICE, kind="cuda")
    seconds = 2 * PLAN.predicted_step_seconds
    for waited, expected in ((0.0, pytest.approx(2.0)), (PLAN.predicted_step_seconds, None)):
        corrections = Corrections()
        found = [corrections.by_time(PLAN, device, seconds, 0.0, waited) for _ in range(2)]
        assert found == [None, expected]


@pytest.mark.parametrize(
    ("changed", "is_worth_it"),
    [({}, True), ({"policy": "all-recompute"}, False), ({"given_plan": PLAN}, False), ({"takes_data": True}, False),
     ({"num_deviations": 1}, False)],
    ids=["auto", "another policy", "a given plan", "data is taken", "it has left its plan"],
)  # fmt: skip
def test_no_plan_is_made_for_the_mode_where_none_would_spare_it(changed: dict[str, Any], is_worth_it: bool) -> None:
    """Only ours weighs the mode, and steps whose ops must be seen anyway have it under any plan."""
    facts = {"policy": "auto", "given_plan": None, "takes_data": False, "num_deviations": 0, **changed}
    plan, given = dataclasses.replace(RECOMPUTING, policy=facts["policy"]), facts["given_plan"]
    kind = PlanEntry(
        source=Recorded() if given is None else Imported(given), graph=GRAPH, program=compile_plan(GRAPH, plan),
        takes_data=facts["takes_data"],
    )  # fmt: skip
    kind.changes.num_deviations = facts["num_deviations"]
    kind.made.spec = dataclasses.replace(DEVICE, kind="cuda")
    seconds = PLAN.predicted_step_seconds + 0.05
    launched = LaunchTimes(Halves(seconds, 0.0), Halves(seconds, 0.0), is_one=True)
    with mock.patch.object(lifecycle, "mode_share", side_effect=lambda graph, seconds: seconds):
        for _ in range(2):
            lifecycle.compare(kind, seconds, 0.0, launched)
    assert (kind.program is None) is is_worth_it
