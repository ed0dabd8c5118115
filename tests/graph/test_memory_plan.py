"""Memory plans: exact round trips, and refusals of files that are malformed or made for another step."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_offload.errors import PlanError
from lightning_offload.graph import Decision, MemoryPlan, StepGraph
from tests.graph.building import GraphBuilder, chain

SIZES = st.integers(0, 1 << 60)
SECONDS = st.floats(0, 1e6)
DECISIONS = st.builds(
    Decision,
    storage=st.integers(0, 1 << 20),
    action=st.sampled_from(["keep", "swap", "recompute"]),
    tier=st.sampled_from(["host", "disk"]),
    release_op=st.integers(-1, 1 << 20),
    prefetch_unpack=st.integers(-1, 1 << 20),
    memo=st.booleans(),
)
PLANS = st.builds(
    MemoryPlan,
    graph_digest=st.text(),
    policy=st.text(),
    budget_bytes=st.none() | SIZES,
    decisions=st.lists(DECISIONS, max_size=5).map(tuple),
    predicted_peak_bytes=SIZES,
    predicted_step_seconds=SECONDS,
    plain_peak_bytes=SIZES,
    plain_step_seconds=SECONDS,
    floor_bytes=SIZES,
    floor_op=st.text(),
    bound_seconds=SECONDS,
    predicted_stall_seconds=SECONDS,
    predicted_host_bytes=SIZES,
    predicted_disk_bytes=SIZES,
)


def plan_for(graph: StepGraph, *decisions: Decision) -> MemoryPlan:
    """A plan with these decisions."""
    return MemoryPlan(
        graph_digest=graph.digest(), policy="auto", budget_bytes=None, decisions=decisions,
        predicted_peak_bytes=1, predicted_step_seconds=1.0, plain_peak_bytes=1, plain_step_seconds=1.0,
        floor_bytes=1, floor_op="op", bound_seconds=1.0,
    )  # fmt: skip


@given(PLANS)
def test_round_trip_is_exact(plan: MemoryPlan) -> None:
    """A plan read from its own JSON equals it."""
    assert MemoryPlan.from_json(plan.to_json()) == plan


def test_plan_from_before_there_were_tiers_is_read() -> None:
    """It predicts no stall and no use of a tier."""
    plan = plan_for(chain(40, 50), Decision(storage=1, action="swap"))
    data = json.loads(plan.to_json())
    for field in ("predicted_stall_seconds", "predicted_host_bytes", "predicted_disk_bytes"):
        del data[field]
    again = MemoryPlan.from_json(json.dumps(data))
    assert again == plan
    assert (again.predicted_stall_seconds, again.predicted_host_bytes, again.predicted_disk_bytes) == (0.0, 0, 0)


def _decision(field: int, item: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda data: data["decisions"][0].__setitem__(field, item)


CORRUPTIONS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "other kind": lambda data: data.update(lightning_offload="step_graph"),
    "newer schema": lambda data: data.update(schema=2),
    "missing field": lambda data: data.pop("policy"),
    "missing decisions": lambda data: data.pop("decisions"),
    "unknown field": lambda data: data.update(colour="red"),
    "decisions are no list": lambda data: data.update(decisions=5),
    "NaN time": lambda data: data.update(bound_seconds=float("nan")),
    "time beyond a float": lambda data: data.update(bound_seconds=10**400),
    "NaN stall": lambda data: data.update(predicted_stall_seconds=float("nan")),
    "text for host bytes": lambda data: data.update(predicted_host_bytes="1GiB"),
    "text for bytes": lambda data: data.update(floor_bytes="12GiB"),
    "unknown action": _decision(1, "burn"),
    "unknown tier": _decision(2, "cloud"),
    "action is a list": _decision(1, []),
    "float storage": _decision(0, 1.0),
    "memo is an int": _decision(5, 1),
    "short decision": lambda data: data["decisions"][0].pop(),
}


def test_corrupt_plan_is_a_plan_error(subtests: pytest.Subtests) -> None:
    """Each way to break a file ends in a PlanError."""
    for corruption in CORRUPTIONS:
        with subtests.test(corruption=corruption):
            graph = chain(40, 50)
            data = json.loads(plan_for(graph, Decision(storage=1, action="swap")).to_json())
            CORRUPTIONS[corruption](data)
            with pytest.raises(PlanError):
                MemoryPlan.from_json(json.dumps(data))


def test_plan_of_another_graph_is_refused() -> None:
    """The message says whose plan it is and what to do."""
    with pytest.raises(PlanError, match="another model") as caught:
        plan_for(chain(40, 50)).check(chain(40, 51))
    assert chain(40, 50).digest() in str(caught.value)
    assert chain(40, 51).digest() in str(caught.value)


def test_decision_outside_the_graph_is_refused(subtests: pytest.Subtests) -> None:
    """Indices of storages, ops and unpacks are checked against the graph."""
    for decisions in [
        (Decision(storage=-1, action="swap"),),
        (Decision(storage=99, action="swap"),),
        (Decision(storage=1, action="swap"), Decision(storage=1, action="keep")),
        (Decision(storage=1, action="swap", release_op=-2),),
        (Decision(storage=1, action="swap", release_op=99),),
        (Decision(storage=1, action="swap", prefetch_unpack=-2),),
        (Decision(storage=1, action="swap", prefetch_unpack=2),),
    ]:
        with subtests.test(decisions=decisions):
            graph = chain(40, 50)
            with pytest.raises(PlanError, match="decisions"):
                plan_for(graph, *decisions).check(graph)


def test_a_step_that_reads_nothing_back_has_no_unpack_to_prefetch_at() -> None:
    """Only what comes back on demand, that is never, is inside it."""
    b = GraphBuilder()
    b.pack(b.make(40, b.given(8)))
    graph = b.build()
    plan_for(graph, Decision(storage=1, action="swap")).check(graph)
    with pytest.raises(PlanError, match="points outside the graph"):
        plan_for(graph, Decision(storage=1, action="swap", prefetch_unpack=0)).check(graph)


def test_decision_at_the_edges_is_accepted() -> None:
    """The last unpack, and a release after the last op, are inside."""
    graph = chain(40, 50)
    plan_for(graph, Decision(storage=1, action="swap", release_op=len(graph.ops), prefetch_unpack=1)).check(graph)


def test_bytes_by_action() -> None:
    """Saved storages count once each under their action, kept where there is no decision."""
    graph = chain(40, 50, 60)
    plan = plan_for(graph, Decision(storage=1, action="swap"), Decision(storage=3, action="recompute"))
    assert [plan.bytes_of(graph, action) for action in ("keep", "swap", "recompute")] == [50, 40, 60]


def test_replaced_times_leave_a_plan_valid() -> None:
    """A plan stays valid for the same step with other op times."""
    graph = chain(40, 50)
    slower = dataclasses.replace(graph, ops=tuple(dataclasses.replace(op, seconds=9.0) for op in graph.ops))
    plan_for(graph).check(slower)
