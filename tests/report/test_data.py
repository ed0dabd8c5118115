"""What a report is made of."""

from __future__ import annotations

import dataclasses

import pytest

from lightning_offload.errors import PlanError, PolicyError
from lightning_offload.graph import StepGraph
from lightning_offload.planning.planner import POLICIES
from lightning_offload.planning.problem import Problem
from lightning_offload.planning.request import PlanRequest
from lightning_offload.report import MeasuredStep, PolicyOutcome, compare_policies
from lightning_offload.report.data import view_plan
from tests.graph.building import GraphBuilder
from tests.report.steps import CARD, MIXED, SIX, net, plan_of


def test_view_has_the_plans_figures() -> None:
    """Peak and time are those that the plan predicts, plain ones those of everything kept."""
    plan = plan_of(SIX, MIXED)
    view = view_plan(SIX, plan, CARD)
    assert view.planned.peak_bytes == plan.predicted_peak_bytes
    assert view.planned.step_seconds == pytest.approx(plan.predicted_step_seconds)
    assert (view.plain.peak_bytes, view.plain.step_seconds) == (plan.plain_peak_bytes, 12.0)
    assert view.overhead == pytest.approx(plan.predicted_step_seconds / 12 - 1)
    assert max(view.forward_peak_bytes, view.backward_peak_bytes) == plan.predicted_peak_bytes


def test_saved_bytes_are_those_of_the_plan() -> None:
    """By action, with the module and the op of each storage."""
    plan = plan_of(SIX, MIXED)
    view = view_plan(SIX, plan, CARD)
    for action in ("keep", "swap", "recompute"):
        assert view.bytes_of(action) == plan.bytes_of(SIX, action) == 200  # type: ignore[arg-type]
    assert [(s.storage, s.module, s.action) for s in view.stored][:2] == [
        (1, "stem", "swap"),
        (2, "body.0.conv", "recompute"),
    ]
    assert view.stored[1].op == "aten.v.default"


def test_persistent_storages_are_not_listed() -> None:
    """A saved weight is no decision."""
    b = GraphBuilder()
    weight = b.given(50)
    b.op((weight,), (10,))
    b.pack(weight)
    graph = b.build()
    assert view_plan(graph, plan_of(graph, {}), CARD).stored == ()


def test_gap_is_none_without_a_bound_and_never_negative() -> None:
    """Rounding may put a plan a hair below its bound."""
    plan = plan_of(SIX, {})
    assert view_plan(SIX, plan, CARD).gap_to_bound == 0.0
    assert view_plan(SIX, dataclasses.replace(plan, bound_seconds=0.0), CARD).gap_to_bound is None
    assert view_plan(SIX, dataclasses.replace(plan, bound_seconds=13.0), CARD).gap_to_bound == 0.0


def test_empty_step_is_refused() -> None:
    """There is nothing to show."""
    graph = StepGraph(num_ticks=0, ops=(), storages=(), values=(), saves=())
    plan = dataclasses.replace(plan_of(SIX, {}), graph_digest=graph.digest())
    with pytest.raises(PlanError, match="nothing to show"):
        view_plan(graph, plan, CARD)


def test_plan_of_another_step_is_refused() -> None:
    """With the planner's own error."""
    with pytest.raises(PlanError, match="another model"):
        view_plan(net("a"), plan_of(SIX, {}), CARD)


def test_comparison_has_each_policy_with_its_overhead_or_its_floor() -> None:
    """Every registered one by default, in their order; below the plain peak keeping everything is infeasible."""
    setting = PlanRequest(Problem(SIX), CARD, None)
    budget = (setting.floor.peak_bytes + setting.plain.peak_bytes) // 2
    outcomes = compare_policies(SIX, CARD, budget)
    assert [outcome.policy for outcome in outcomes] == list(POLICIES)
    found = {outcome.policy: outcome for outcome in outcomes}
    auto, keep = found["auto"], found["keep-all"]
    assert auto.overhead is not None
    assert auto.overhead >= 0
    assert auto.peak_bytes is not None
    assert auto.peak_bytes <= budget
    assert keep == PolicyOutcome(policy="keep-all", floor_bytes=setting.plain.peak_bytes)
    assert keep.overhead is None


def test_comparison_of_an_unknown_policy_is_refused() -> None:
    """It is a typing error, not an infeasible policy."""
    with pytest.raises(PolicyError, match="unknown policy 'best'"):
        compare_policies(SIX, CARD, None, policies=["auto", "best"])


def test_nothing_is_measured_by_default() -> None:
    """Each figure is unknown until it is given."""
    assert set(dataclasses.asdict(MeasuredStep()).values()) == {None}
