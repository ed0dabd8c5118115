"""The report in a terminal."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console, RenderableType

from lightning_offload.report import MeasuredStep, PolicyOutcome, comparison_table, render_text
from lightning_offload.report.tables import budget_text
from tests.report.steps import CARD, MIXED, SIX, net, plan_of


def printed(what: RenderableType) -> str:
    out = io.StringIO()
    Console(file=out, width=100, color_system=None).print(what)
    return "\n".join(" ".join(line.split()) for line in out.getvalue().splitlines())


def text(**options: Any) -> str:
    return printed(render_text(SIX, plan_of(SIX, MIXED, budget_bytes=600), CARD, **options))


def test_tables_have_the_plans_figures() -> None:
    """Key figures, bytes by module with their sum, and the storages that would cost most to keep."""
    plan = plan_of(SIX, MIXED, budget_bytes=600)
    shown = text()
    lines = shown.splitlines()
    assert "Policy auto within 600 B on a card" in lines
    assert "budget 600 B" in lines
    assert f"smallest feasible budget {plan.floor_bytes} B, set by {plan.floor_op}" in lines
    assert f"peak, planned {plan.predicted_peak_bytes} B" in lines
    assert "│ stem │ │ 100 B │ │" in lines
    assert "│ all │ 200 B │ 200 B │ 200 B │" in lines
    assert any(line.startswith("│ stem │ m │ 100 B │") and line.endswith("│ swap (host) │") for line in lines)
    assert "Measured" not in shown


def test_measured_figures_have_a_table() -> None:
    """Where there are any."""
    lines = text(measured=MeasuredStep(step_seconds=15.0, optimizer_peak_bytes=77)).splitlines()
    assert "┃ ┃ predicted ┃ measured ┃" in lines
    assert "│ optimizer peak │ n/a │ 77 B │" in lines
    assert any(line.startswith("│ step time │") and line.endswith("│ 15.00 s │") for line in lines)


def test_number_of_storages_can_be_chosen() -> None:
    """None of them too."""
    assert "The 2 storages that would cost most to keep" in text(num_storages=2)
    assert "storages that would cost" not in text(num_storages=0)


def test_policies_stand_side_by_side() -> None:
    """An infeasible one says what it needs; what is not known of one is left open."""
    outcomes = [
        PolicyOutcome(policy="auto", step_seconds=13.2, plain_step_seconds=12.0, peak_bytes=500),
        PolicyOutcome(
            policy="all-swap", step_seconds=13.2, plain_step_seconds=12.0, peak_bytes=500, swap_bytes=512,
            recompute_bytes=0,
        ),
        PolicyOutcome(policy="keep-all", floor_bytes=2048),
    ]  # fmt: skip
    shown = printed(comparison_table(outcomes))
    lines = shown.splitlines()
    assert "│ auto │ 500 B │ 13.20 s │ +10.0% │ n/a │ n/a │" in lines
    assert "│ all-swap │ 500 B │ 13.20 s │ +10.0% │ 1.0 KiB │ 0 B │" in lines
    assert "│ keep-all │ 2.0 KiB │ infeasible │ - │ - │ - │" in lines
    assert "infeasible: the peak is the smallest budget that the policy meets" in lines
    assert "│ auto │ 500 B │ 13.20 s │ +10.0% │ n/a │ n/a │" in text(comparison=outcomes).splitlines()


def test_a_budget_that_is_none() -> None:
    """There is no limit then."""
    assert budget_text(None) == "no limit"


def test_names_are_text_not_markup() -> None:
    """A module named like rich's markup shows as it is."""
    graph = net("[bold]x[/]", "y")
    shown = printed(render_text(graph, plan_of(graph, {}, policy="[red]p"), CARD))
    assert "│ [bold]x[/] │ 100 B │" in shown
    assert "Policy [red]p on a card" in shown
