"""What becomes of plans: which outlive a run, what takes the place of one that cannot be made."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import get_args

import pytest
import torch

from lightning_offload.planning.planner import plan
from lightning_offload.plugins import lifecycle
from lightning_offload.plugins.plan_entry import Phase, PlanEntry
from lightning_offload.plugins.plan_source import Imported, Recorded
from lightning_offload.plugins.replanning import REASONS, Reason
from lightning_offload.runtime.program import compile_plan
from tests.graph.building import DEVICE, chain
from tests.plugins.training import attached, middle_budget, net, report_of, rows, train_step

GRAPH = chain(100, 200, 300, 200)
PLAN = plan(GRAPH, DEVICE, None, policy="all-recompute")


def _planned() -> PlanEntry:
    kind = PlanEntry(phase="planned", graph=GRAPH, program=compile_plan(GRAPH, PLAN))
    kind.made.spec = DEVICE
    return kind


def _gave_up_for_times(kind: PlanEntry) -> None:
    kind.replan("time", lasts=True)


def test_a_plan_in_force_outlives_its_run_and_so_does_one_that_took_too_long() -> None:
    """Nobody has found it wrong."""
    kind = _planned()
    assert kind.lasting_plan is PLAN
    _gave_up_for_times(kind)
    assert kind.lasting_plan is PLAN


@pytest.mark.parametrize(
    "what", ["mismatched", "more beside", "gradients", "recorded again", "over", "out of memory", "measured more"]
)
def test_one_that_was_found_wrong_does_not(what: str) -> None:
    """It would be taken for final, by whoever goes on."""
    kind = _planned()
    if what == "measured more":  # it was not final, and the one with a margin is yet to be made
        kind.replan("peak")
        assert kind.shown_plan is PLAN
    elif what == "out of memory":
        lifecycle.ran_out_of_memory(kind)
    else:
        _gave_up_for_times(kind)
    if what == "mismatched":
        lifecycle.demote(kind, PLAN.decisions[0].storage)
    elif what == "more beside":
        kind.note_baseline(1 << 20, PLAN.predicted_peak_bytes)
    elif what == "gradients":
        kind.begin_with_gradients({1: 1 << 20})
    elif what == "recorded again":
        lifecycle.record_again(kind)
    elif what == "over":
        kind.made.is_over = True
    assert kind.lasting_plan is None


@pytest.mark.parametrize("phase", [phase for phase in get_args(Phase) if phase != "idle"])
def test_a_replay_that_comes_out_otherwise_is_noted_in_any_phase(phase: Phase) -> None:
    """Late, too: a backward in parts may go on while the next step runs without a plan."""
    kind = dataclasses.replace(_planned(), phase=phase)
    lifecycle.demote(kind, 1)
    assert kind.mismatched == {1}
    assert kind.program is None
    assert kind.phase == (phase if phase in ("recording", "unplanned") else "verifying")


@pytest.mark.parametrize("with_step", [False, True])
def test_a_given_plan_comes_into_force_at_once_and_leaves_without_a_trace(with_step: bool) -> None:
    """Whatever plan there was; that a step is from an earlier run is not forgotten meanwhile."""
    kind = _planned() if not with_step else PlanEntry()
    kind.was_restored = True
    lifecycle.take_imported(kind, PLAN, GRAPH if with_step else None)
    assert isinstance(kind.source, Imported)
    assert kind.program is None
    lifecycle.leave_imported(kind)
    assert isinstance(kind.source, Recorded)
    assert kind.was_restored
    assert kind.has_left_imported
    assert (kind.graph is None, kind.phase) == ((True, "recording") if with_step else (False, "planned"))


def test_a_recorded_step_is_planned_by_itself_where_there_is_no_plan_for_its_family() -> None:
    """It is not recorded again: its own recording knows better than what others showed."""
    model, budget = net(), middle_budget(net(), rows(32))
    with attached(model, budget=budget) as memory:
        phases = []
        for step, size in enumerate((8, 64, 32, 32, 32, 32)):
            if step == 4:
                (family,) = memory._steps.cache.families.values()
                family.shortfall_bytes = budget  # which leaves no room for any plan of another size
            train_step(model, rows(size), memory)
            phases.append(memory.phase)
    assert phases == [*["recording"] * 3, "planned", "verifying", "measuring"]


def test_a_given_plan_is_offered_though_others_could_stand_for_its_step() -> None:
    """A plan without its step waits for the recording of that."""
    given, model = report_of(net(), rows(32), policy="all-swap").planned, net()
    assert given is not None
    with attached(model, plan=given.plan) as memory:
        for size in (8, 64, 32, 32):
            train_step(model, rows(size), memory)
        assert isinstance(memory._steps.cache.entry.source, Imported)


def test_the_report_counts_final_plans_that_were_given_up_by_why() -> None:
    """The plans before the final one are no replans; each reason has its line in the docs."""
    model, budget, held = net(), middle_budget(net(), rows()), []
    with attached(model, budget=budget) as memory:
        for _ in range(4):
            train_step(model, rows(), memory)
        assert memory.phase == "planned"
        assert not memory.report().replans
        held.append(torch.zeros(3 << 18))  # 3 MiB that come to stay
        memory._steps.baseline.doubt()
        train_step(model, rows(), memory)
        assert memory.report().replans == {"baseline": 1}
        assert "1 (baseline)" in str(memory.report())
    page = (Path(__file__).parents[2] / "docs/report.md").read_text(encoding="utf-8")
    section = page.split("### Why a plan was given up")[1].split("## ")[0]
    rows_of_page = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")][1:]
    assert dict(rows_of_page) == REASONS
    assert get_args(Reason) == tuple(REASONS)
