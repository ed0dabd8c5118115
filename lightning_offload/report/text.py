"""The report as tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, get_args

from lightning_offload.graph.device_spec import DeviceSpec
from lightning_offload.graph.memory_plan import Action, MemoryPlan
from lightning_offload.graph.step_graph import StepGraph
from lightning_offload.report.bar_plots import WORDS, measured_rows
from lightning_offload.report.data import MeasuredStep, PlanView, PolicyOutcome, view_plan
from lightning_offload.report.page_parts import heading, lead, storage_rows
from lightning_offload.report.rows import module_rows
from lightning_offload.report.scale import format_share, or_dash, shorten
from lightning_offload.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

__all__ = ["comparison_table", "render_text"]

_STYLES: dict[Action, str] = {"keep": "blue", "swap": "yellow", "recompute": "green"}


def render_text(
    graph: StepGraph,
    plan: MemoryPlan,
    device: DeviceSpec,
    *,
    measured: MeasuredStep | None = None,
    comparison: Sequence[PolicyOutcome] | None = None,
    num_storages: int = 10,
) -> Group:
    """A plan as tables; print them with ``rich.console.Console().print``.

    Args:
        graph: The step.
        plan: The plan for it.
        device: Where it runs.
        measured: What was measured of steps under the plan.
        comparison: The outcomes of several policies.
        num_storages: How many of the largest saved storages are listed.

    Raises:
        PlanError: The plan is one for another step.
    """
    from rich.console import Group, RenderableType
    from rich.text import Text

    view = view_plan(graph, plan, device, measured=measured, comparison=comparison)
    parts: list[RenderableType] = [Text(heading(view), style="bold"), Text(lead(view)), _figures(view), _modules(view)]
    if num_storages > 0 and view.stored:
        parts.append(_storages(view, num_storages))
    if view.comparison:
        parts.append(comparison_table(view.comparison))
    return Group(*parts)


def comparison_table(outcomes: Sequence[PolicyOutcome]) -> Table:
    """Policies side by side."""
    table = _table("Policies", "policy", ">overhead", ">step time", ">peak", "within the budget")
    for outcome in outcomes:
        feasible = outcome.step_seconds is not None
        floor = f"no: needs {or_dash(outcome.floor_bytes, 'bytes')}"
        _add(
            table,
            outcome.policy,
            format_share(outcome.overhead),
            or_dash(outcome.step_seconds, "seconds"),
            or_dash(outcome.peak_bytes, "bytes"),
            "yes" if feasible else floor,
            style="" if feasible else "dim",
        )
    return table


def _figures(view: PlanView) -> Table:
    measured = {label: value for label, _, _, value in measured_rows(view)}
    with_measured = any(value is not None for value in measured.values())
    table = _table("Key figures", "", ">predicted", *([">measured"] if with_measured else []))
    rows = [
        ("budget", or_dash(view.plan.budget_bytes, "bytes"), ""),
        ("floor", format_bytes(view.plan.floor_bytes), ""),
        ("plain peak", format_bytes(view.plain.peak_bytes), ""),
        *(
            (label, or_dash(predicted, kind), or_dash(value, kind) if value is not None else "")
            for label, kind, predicted, value in measured_rows(view)
        ),
        ("overhead", format_share(view.overhead), ""),
        ("lower bound", format_seconds(view.plan.bound_seconds), ""),
        ("gap to the bound", format_share(view.gap_to_bound), ""),
    ]
    for label, predicted, value in rows:
        _add(table, label, predicted, *([value] if with_measured else []))
    return table


def _modules(view: PlanView) -> Table:
    table = _table("Decisions by module", "module", *(f">{WORDS[action]}" for action in get_args(Action)), ">saved")
    for row in module_rows(view.stored):
        sizes = [format_bytes(size) if size else "" for size in row.num_bytes.values()]
        _add(table, shorten(row.label, 48), *sizes, format_bytes(row.total_bytes))
    totals = [view.bytes_of(action) for action in get_args(Action)]
    table.add_section()
    _add(table, "all", *(format_bytes(size) for size in totals), format_bytes(sum(totals)), style="bold")
    return table


def _storages(view: PlanView, num: int) -> Table:
    table = _table("Largest saved storages", ">size", "saved by", "made by", "decision")
    for size, module, op, action, what, _ in storage_rows(view, num):
        _add(table, size, shorten(module, 40), op, what, style=_STYLES[action])
    return table


def _table(title: str, *columns: str) -> Table:
    """A table; a column whose name begins with ">" is aligned to the right."""
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, title_style="bold")
    for column in columns:
        table.add_column(column.removeprefix(">"), justify="right" if column.startswith(">") else "left")
    return table


def _add(table: Table, *cells: str, style: str = "") -> None:
    """Add a row of plain text: names are the user's, and may look like markup."""
    from rich.text import Text

    table.add_row(*(Text(cell) for cell in cells), style=style)
