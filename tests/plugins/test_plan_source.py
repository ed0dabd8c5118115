"""Where plans come from: each source plans, compiles, and tells of the steps under it."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from lightning_offload.errors import BudgetInfeasibleError
from lightning_offload.graph import StepGraph
from lightning_offload.planning.planner import plan
from lightning_offload.plugins.plan_source import (
    Imported,
    Measured,
    PlanSource,
    PlanTask,
    Recorded,
    ShapeBucket,
    Superset,
)
from lightning_offload.plugins.planned_baseline import ExternalStorages
from lightning_offload.plugins.shape_families import ShapeFamily
from lightning_offload.plugins.step_variants import Variant
from lightning_offload.plugins.structure_changes import StructureChanges
from lightning_offload.tensors.saved_forms import SavedForm
from tests.graph.building import DEVICE, chain


def _step(n: int) -> StepGraph:
    return chain(100 * n, 200 * n, 300 * n, 200 * n)


def _form(num_bytes: int) -> SavedForm:
    return SavedForm(torch.uint8, (num_bytes,))


def _recorded() -> tuple[PlanSource, StepGraph]:
    return Recorded(), _step(4)


def _bucket() -> tuple[PlanSource, StepGraph]:
    family = ShapeFamily("any")  # whose recorded steps are alike but for sizes
    for n in (2, 4, 8):
        family.learn(str(n), (n,), _step(n))
    extrapolated = family.find((6,))
    assert extrapolated is not None
    source = ShapeBucket(family, extrapolated)
    return source, source.step()


def _superset() -> tuple[PlanSource, StepGraph]:
    changes, graph = StructureChanges(), _step(4)
    saved = [graph.storages[graph.values[save.value].storage].num_bytes for save in graph.saves]
    changes.variants.learn(Variant(graph, tuple(map(_form, saved)), frozenset(), ExternalStorages(), 0))
    source = Superset(changes)
    return source, source.step


def _imported() -> tuple[PlanSource, StepGraph]:
    graph = _step(4)
    return Imported(plan(graph, DEVICE, None, policy="all-swap"), graph), graph


SOURCES = {"recorded": _recorded, "shape bucket": _bucket, "superset": _superset, "imported": _imported}


@pytest.mark.parametrize("name", SOURCES)
def test_each_plans_within_the_budget_and_its_margin(name: str) -> None:
    """And raises below its floor, with what is needed."""
    source, graph = SOURCES[name]()
    task = PlanTask(graph=graph, device=DEVICE, budget_bytes=None, policy="auto")
    if isinstance(source, Imported):  # whose plan is followed where it fits
        assert source.make(task).decisions == source.plan.decisions
    else:
        assert not source.make(task).decisions
    plain_bytes = plan(graph, DEVICE, None).predicted_peak_bytes
    with pytest.raises(BudgetInfeasibleError) as caught:
        source.make(dataclasses.replace(task, budget_bytes=1))
    floor_bytes = caught.value.floor_bytes
    assert floor_bytes < plain_bytes
    for margin_bytes in (0, 50):
        budget_bytes = (floor_bytes + plain_bytes) // 2 + margin_bytes
        made = source.make(dataclasses.replace(task, budget_bytes=budget_bytes, margin_bytes=margin_bytes))
        assert made.predicted_peak_bytes <= budget_bytes
        assert source.compile(graph, made).plan is made
        measured = Measured(
            peak_bytes=made.predicted_peak_bytes + 7,
            plan=made,
            margin_bytes=margin_bytes,
            graph=graph,
            device=DEVICE,
            input_shapes=(),
        )
        assert source.unforeseen_bytes(measured) >= margin_bytes + 7


@pytest.mark.parametrize("name", SOURCES)
def test_what_is_not_to_be_recomputed_is_not(name: str) -> None:
    """Whatever the source: replays of these did not give the same bits."""
    source, graph = SOURCES[name]()
    saved = frozenset(graph.values[save.value].storage for save in graph.saves)
    task = PlanTask(graph=graph, device=DEVICE, budget_bytes=None, policy="all-recompute", mismatched=saved)
    assert all(decision.action != "recompute" for decision in source.make(task).decisions)


def test_a_plan_of_another_is_not_taken_where_it_recomputes_what_came_out_otherwise() -> None:
    """Its step is planned anew then."""
    graph = _step(4)
    given = plan(graph, DEVICE, None, policy="all-recompute")
    recomputed = {decision.storage for decision in given.decisions if decision.action == "recompute"}
    source = Imported(given, graph)
    task = PlanTask(graph=graph, device=DEVICE, budget_bytes=None)
    assert recomputed
    assert source.make(task).decisions == given.decisions
    assert not source.make(dataclasses.replace(task, mismatched=frozenset(recomputed))).decisions


@pytest.mark.parametrize(("name", "longest"), [("recorded", 512), ("shape bucket", 32), ("superset", 32)])
def test_only_steps_under_one_plan_come_to_be_counted_ever_more_seldom(name: str, longest: int) -> None:
    """Sizes and structures that vary are counted as often for good."""
    source, _ = SOURCES[name]()
    counted = []
    for step in range(3000):
        is_counted = source.must_count()
        source.begin_step(is_counted=is_counted)
        counted += [step] * is_counted
    assert longest - 4 <= max(later - earlier for earlier, later in itertools.pairwise(counted)) <= longest
