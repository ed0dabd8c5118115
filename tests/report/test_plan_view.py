"""What a report is made of."""

from __future__ import annotations

import dataclasses

import pytest

from lightning_offload.errors import PlanError, PolicyError
from lightning_offload.graph import Decision, MemoryPlan, StepGraph
from lightning_offload.planning.planner import POLICIES
from lightning_offload.planning.problem import Problem
from lightning_offload.planning.request import PlanRequest
from lightning_offload.report import MeasuredStep, PolicyOutcome, compare_policies
from lightning_offload.report.plan_view import bytes_by_action, costliest, module_totals, stored_in, view_plan
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
    for action, num_bytes in bytes_by_action(view.stored).items():
        assert num_bytes == plan.bytes_of(SIX, action) == 200
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


def step() -> StepGraph:
    """Two ops in forward whose results are saved, and backward ops of 2, 3 and 1 s that need them in reverse."""
    build = GraphBuilder()
    weight = build.given(100)
    a = build.op((weight,), (10,), name="aten.mm.default", module="first")[0]
    save_a = build.pack(a, module="first")
    save_weight = build.pack(weight, module="first")
    b = build.op((a,), (40,), name="aten.relu.default", seconds=4.0, module="second")[0]
    save_b = build.pack(b, module="second")
    build.backward()
    for save, seconds in ((save_b, 2.0), (save_a, 3.0), (save_weight, 1.0)):
        build.unpack(save)
        build.op((), (1,), seconds=seconds)
        build.release(save)
    return build.build()


def decided(graph: StepGraph, *decisions: Decision) -> MemoryPlan:
    return MemoryPlan(
        graph_digest=graph.digest(), policy="auto", budget_bytes=None, decisions=decisions, predicted_peak_bytes=1,
        predicted_step_seconds=1.0, plain_peak_bytes=1, plain_step_seconds=1.0, floor_bytes=1, floor_op="",
        bound_seconds=1.0,
    )  # fmt: skip


def test_saved_storages() -> None:
    """Persistent ones do not count; idle time is that of the ops in between; the costliest to keep comes first."""
    graph = step()
    swap = Decision(storage=1, action="swap", tier="disk")
    a, b = costliest(reversed(stored_in(graph, decided(graph, swap))))
    assert (a.module, a.op, a.num_bytes, a.idle_seconds, a.action, a.tier) == (
        "first", "aten.mm.default", 10, 6.0, "swap", "disk"
    )  # fmt: skip
    assert (b.module, b.op, b.num_bytes, b.idle_seconds, b.action, b.tier) == (
        "second", "aten.relu.default", 40, 0.0, "keep", None
    )  # fmt: skip
    assert a.weight == 60.0
    assert a.state_dict() == {
        "storage": 1, "module": "first", "op": "aten.mm.default", "num_bytes": 10, "idle_seconds": 6.0,
        "action": "swap", "tier": "disk",
    }  # fmt: skip


def test_totals() -> None:
    """Bytes by action, in all and by module."""
    graph = step()
    saved = stored_in(graph, decided(graph, Decision(storage=2, action="recompute")))
    assert bytes_by_action(saved) == {"keep": 10, "swap": 0, "recompute": 40}
    assert module_totals(saved) == [
        {"module": "first", "keep_bytes": 10, "swap_bytes": 0, "recompute_bytes": 0},
        {"module": "second", "keep_bytes": 0, "swap_bytes": 0, "recompute_bytes": 40},
    ]
