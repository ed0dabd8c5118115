"""The report in a terminal."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console, RenderableType

from lightning_offload.report import MeasuredStep, PolicyOutcome, comparison_table, render_text
from tests.report.steps import CARD, MIXED, SIX, net, plan_of


def printed(what: RenderableType) -> str:
    out = io.StringIO()
    Console(file=out, width=100, color_system=None).print(what)
    return "\n".join(" ".join(line.split()) for line in out.getvalue().splitlines())


def text(**options: Any) -> str:
    return printed(render_text(SIX, plan_of(SIX, MIXED, budget_bytes=600), CARD, **options))


def test_tables_have_the_plans_figures() -> None:
    """Key figures, bytes by module with their sum, and the largest storages."""
    plan = plan_of(SIX, MIXED, budget_bytes=600)
    lines = text().splitlines()
    for line in (
        "Policy auto within 600 B on a card",
        "budget 600 B",
        f"floor {plan.floor_bytes} B",
        f"peak of the step {plan.predicted_peak_bytes} B",
        "stem 100 B 100 B",
        "all 200 B 200 B 200 B 600 B",
        "100 B stem aten.m.default swapped to host",
    ):
        assert line in lines, line
    assert "measured" not in text()


def test_measured_figures_have_a_column() -> None:
    """Where there are any."""
    lines = text(measured=MeasuredStep(step_seconds=15.0, optimizer_peak_bytes=77)).splitlines()
    assert "predicted measured" in lines
    assert "optimizer peak n/a 77 B" in lines
    assert any(line.startswith("step time ") and line.endswith(" 15.00 s") for line in lines)


def test_number_of_storages_can_be_chosen() -> None:
    """None of them too."""
    assert text(num_storages=2).count("aten.") == 2
    assert "Largest saved storages" not in text(num_storages=0)


def test_policies_stand_side_by_side() -> None:
    """An infeasible one says what it needs."""
    outcomes = [
        PolicyOutcome(policy="auto", step_seconds=13.2, plain_step_seconds=12.0, peak_bytes=500),
        PolicyOutcome(policy="keep-all", floor_bytes=2048),
    ]
    lines = printed(comparison_table(outcomes)).splitlines()
    assert "auto +10.0 % 13.20 s 500 B yes" in lines
    assert "keep-all n/a n/a n/a no: needs 2.0 KiB" in lines
    assert "auto +10.0 % 13.20 s 500 B yes" in text(comparison=outcomes).splitlines()


def test_names_are_text_not_markup() -> None:
    """A module named like rich's markup shows as it is."""
    graph = net("[bold]x[/]", "y")
    shown = printed(render_text(graph, plan_of(graph, {}, policy="[red]p"), CARD))
    assert "[bold]x[/] 100 B" in shown
    assert "Policy [red]p on a card" in shown
