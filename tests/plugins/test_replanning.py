"""What measured steps showed of memory is put where it was seen."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from lightning_offload.graph import Decision
from lightning_offload.planning.planner import plan
from lightning_offload.planning.problem import Problem
from lightning_offload.planning.trace import simulate_plan
from lightning_offload.plugins import feedback
from lightning_offload.plugins.pace import HostTimes, Pace
from lightning_offload.plugins.replanning import Corrections, with_unforeseen
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


def test_a_host_that_takes_longer_than_thought_has_a_plan_made_again() -> None:
    """When two steps in a row have shown it, and no more often than that is news."""
    corrections, wait = Corrections(), PLAN.predicted_step_seconds
    assert [corrections.by_host(RECOMPUTING, 1, seconds) for seconds in (wait, 0.001 * wait, wait)] == [False] * 3
    assert corrections.by_host(RECOMPUTING, 1, 0.5 * wait)
    assert corrections.known_seconds == 0.5 * wait
    corrections.begin_plan()
    for seconds in (0.5 * wait, 0.54 * wait):
        assert not corrections.by_host(RECOMPUTING, 1, seconds)
    assert corrections.by_host(RECOMPUTING, 1, 0.6 * wait) is False  # 0.54 lasts, which is not much more than 0.5
    for _ in range(4):
        corrections.begin_plan()
        corrections.by_host(RECOMPUTING, 1, 100 * wait * (1 + corrections.known_seconds))
        corrections.by_host(RECOMPUTING, 1, 100 * wait * (1 + corrections.known_seconds))
    assert corrections.num_timed == 3


@pytest.mark.parametrize(("waited", "call", "mode"), [(0.4, 0.1e-3, 0.0), (2.0, 0.3e-3, 0.8)], ids=["calls", "a mode"])
def test_what_a_device_waits_is_the_price_of_the_calls_that_are_recorded(waited: float, call: float, mode: float) -> None:
    """As much of it as calls were ever seen to cost; the rest is the mode's."""
    corrections = Corrections()
    assert [corrections.by_host(RECOMPUTING, 4000, waited) for _ in range(2)] == [False, True]
    assert corrections.call_seconds == pytest.approx(call)
    assert corrections.mode_seconds == pytest.approx(mode)


def test_a_plan_that_records_nothing_is_not_made_again_for_the_host() -> None:
    """The host may be slow there too, but not by what a plan asks of it."""
    corrections = Corrections()
    assert not any(corrections.by_host(PLAN, 0, PLAN.predicted_step_seconds) for _ in range(3))


def test_waits_for_the_host_are_not_blamed_on_ops() -> None:
    """A step twice as long has its ops' durations doubled, unless the device waited for the host for half of it."""
    device = dataclasses.replace(DEVICE, kind="cuda")
    seconds = 2 * PLAN.predicted_step_seconds
    for waited, expected in ((0.0, pytest.approx(2.0)), (PLAN.predicted_step_seconds, None)):
        corrections = Corrections()
        found = [
            corrections.by_time(PLAN, device, seconds, 0.0, waited, is_slower=False, is_faster=False) for _ in range(2)
        ]
        assert found == [None, expected]


@pytest.mark.parametrize(
    ("changed", "is_worth_it"),
    [({}, True), ({"policy": "all-recompute"}, False), ({"given_plan": PLAN}, False), ({"takes_data": True}, False),
     ({"num_deviations": 1}, False)],
    ids=["auto", "another policy", "a given plan", "data is taken", "it has left its plan"],
)  # fmt: skip
def test_no_plan_is_made_for_the_host_where_none_would_ask_less_of_it(changed: dict[str, Any], is_worth_it: bool) -> None:
    """Only ours weighs the mode, and steps whose ops must be seen anyway have it under any plan."""
    facts = {"policy": "auto", "given_plan": None, "takes_data": False, "num_deviations": 0, **changed}
    kind: Any = SimpleNamespace(
        plan=dataclasses.replace(RECOMPUTING, policy=facts["policy"]), given_plan=facts["given_plan"],
        takes_data=facts["takes_data"], changes=SimpleNamespace(num_deviations=facts["num_deviations"]),
        family=None, aligns=False, program=SimpleNamespace(num_calls=1), superseded=None,
        graph=GRAPH, spec=dataclasses.replace(DEVICE, kind="cuda"), pace=Pace(), corrections=Corrections(),
    )  # fmt: skip
    host = HostTimes(PLAN.predicted_step_seconds + 0.05, 0.0)
    with mock.patch.object(feedback, "mode_share", side_effect=lambda graph, seconds: seconds):
        for _ in range(2):
            feedback.compare(kind, host.forward, 0.0, host, is_link_slower=False)
    assert (kind.program is None) is is_worth_it
