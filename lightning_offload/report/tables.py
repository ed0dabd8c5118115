"""A plan as tables for a terminal: of a report, and of the commands.

A table's first column names its rows: it keeps its width in a narrow terminal, where others fold (:func:`make_table`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lightning_offload.graph.device_spec import DeviceSpec
from lightning_offload.graph.memory_plan import MemoryPlan
from lightning_offload.graph.step_graph import StepGraph
from lightning_offload.planning.findings import FloorFinding
from lightning_offload.report.bar_plots import measured_rows
from lightning_offload.report.page_parts import heading, lead
from lightning_offload.report.plan_view import (
    MeasuredStep,
    PlanView,
    PolicyOutcome,
    Stored,
    bytes_by_action,
    costliest,
    gap_to_bound,
    overhead,
    view_plan,
)
from lightning_offload.report.printed import PrintedTables
from lightning_offload.report.rows import module_rows
from lightning_offload.report.scale import format_share, or_dash, shorten
from lightning_offload.units import format_budget, format_bytes, format_seconds

_NEGLIGIBLE = 0.005  # share of a floor
_MOST_MIN_WIDTH = 24  # of a first column; longer names fold

if TYPE_CHECKING:
    from rich.table import Table

__all__ = [
    "action_rows", "add_row", "budget_text", "comparison_table", "floor_rows", "live_table", "make_table",
    "modules_table", "prediction_rows", "remedies_table", "render_text", "storages_table", "two_columns",
]  # fmt: skip


def render_text(
    graph: StepGraph,
    plan: MemoryPlan,
    device: DeviceSpec,
    *,
    measured: MeasuredStep | None = None,
    comparison: Sequence[PolicyOutcome] | None = None,
    num_storages: int = 10,
) -> PrintedTables:
    """A plan as tables, for ``print`` or ``rich.console.Console().print``.

    Args:
        graph: The step.
        plan: The plan for it.
        device: Where it runs.
        measured: What was measured of steps under the plan.
        comparison: The outcomes of several policies.
        num_storages: How many of the saved storages that would cost most to keep are listed.

    Raises:
        PlanError: The plan is one for another step.
    """
    from rich.console import RenderableType
    from rich.text import Text

    view = view_plan(graph, plan, device, measured=measured, comparison=comparison)
    figures = two_columns([*prediction_rows(plan), *action_rows(plan, view.stored)])
    parts: list[RenderableType] = [Text(heading(view), style="bold"), Text(lead(view)), figures]
    if any(value is not None for *_, value in measured_rows(view)):
        parts.append(_measured_table(view))
    parts.append(modules_table(view.stored))
    if num_storages > 0 and view.stored:
        parts.append(storages_table(view.stored, num_storages))
    if view.comparison:
        parts.append(comparison_table(view.comparison))
    return PrintedTables(*parts)


def two_columns(rows: Sequence[tuple[str, str]]) -> Table:
    """A table of names and what they are."""
    from rich.table import Table

    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for row in rows:
        add_row(table, *row)
    return table


def budget_text(num_bytes: int | None, typed: str | None = None) -> str:
    """A budget for a person, as it was typed where that is known; "no limit" for None."""
    return "no limit" if num_bytes is None else format_budget(num_bytes, typed)


def prediction_rows(plan: MemoryPlan, budget: str | None = None) -> list[tuple[str, str]]:
    """What a plan predicts.

    Args:
        plan: The plan.
        budget: Its budget as it was typed, where that is known.
    """
    stall = plan.predicted_stall_seconds
    return [
        ("budget", budget_text(plan.budget_bytes, budget)),
        ("peak, plain", format_bytes(plan.plain_peak_bytes)),
        ("peak, planned", format_bytes(plan.predicted_peak_bytes)),
        ("smallest feasible budget", f"{format_bytes(plan.floor_bytes)}, set by {plan.floor_op}"),
        ("step time, plain", format_seconds(plan.plain_step_seconds)),
        ("step time, planned", f"{format_seconds(plan.predicted_step_seconds)} ({format_share(overhead(plan))})"),
        ("waiting for copies", format_seconds(stall) if stall else "none"),
        ("lower bound", f"{format_seconds(plan.bound_seconds)} (the plan is at {format_share(gap_to_bound(plan))})"),
    ]


def action_rows(plan: MemoryPlan, stored: Sequence[Stored]) -> list[tuple[str, str]]:
    """What happens to what was saved."""
    totals = bytes_by_action(stored)
    counts = {action: sum(each.action == action for each in stored) for action in totals}
    where = f"{format_bytes(plan.predicted_host_bytes)} of host memory"
    if plan.predicted_disk_bytes:
        where += f", {format_bytes(plan.predicted_disk_bytes)} of disk"
    return [
        ("kept", f"{format_bytes(totals['keep'])} in {counts['keep']:,}"),
        ("swapped", f"{format_bytes(totals['swap'])} in {counts['swap']:,}, at most {where} at once"),
        ("recomputed", f"{format_bytes(totals['recompute'])} in {counts['recompute']:,}"),
    ]


def storages_table(stored: Sequence[Stored], num: int) -> Table:
    """The saved storages that would cost most to keep, each with who saved it and what happens to it.

    Args:
        stored: All of them.
        num: How many are listed.
    """
    shown = costliest(stored)[:num]
    title = f"The {len(shown)} storages that would cost most to keep (bytes x time until they are needed)"
    table = make_table(title, "module", "made by", ">size", ">idle", "action")
    for each in shown:
        action = f"{each.action} ({each.tier})" if each.tier is not None else each.action
        op = each.op.removeprefix("aten.").removesuffix(".default")
        idle = format_seconds(each.idle_seconds)
        add_row(table, each.module or "-", op or "-", format_bytes(each.num_bytes), idle, action)
    return table


def modules_table(stored: Sequence[Stored], *, is_whole: bool = False) -> Table:
    """What happens to what each module saved.

    Args:
        stored: All that was saved.
        is_whole: Whether each module has a row; modules that are too many for a table are put together otherwise.
    """
    table = make_table("What each module saved, in the order of the step", "module", ">kept", ">swapped", ">recomputed")
    for row in module_rows(stored, max(1, len(stored))) if is_whole else module_rows(stored):
        add_row(table, shorten(row.label, 48), *(format_bytes(each) if each else "" for each in row.num_bytes.values()))
    table.add_section()
    add_row(table, "all", *(format_bytes(each) for each in bytes_by_action(stored).values()), style="bold")
    return table


def floor_rows(finding: FloorFinding, plan: MemoryPlan) -> list[tuple[str, str]]:
    """What sets a step's floor, and of what it consists.

    Args:
        finding: The floor.
        plan: A plan for the step, which may have been made within limits of its own.
    """
    rows = [
        ("set by", finding.op),
        ("smallest feasible budget", format_bytes(finding.floor_bytes)),
        ("there before the step", format_bytes(finding.persistent_bytes)),
        ("made in the step", format_bytes(sum(each.num_bytes for each in finding.live))),
        ("workspaces and the rest", format_bytes(finding.other_bytes)),
    ]
    if plan.floor_bytes != finding.floor_bytes:
        rows.append(
            ("under the plan's limits", f"{format_bytes(plan.floor_bytes)}, of what it keeps, its host and its state")
        )
    return rows


def live_table(finding: FloorFinding, num: int) -> Table:
    """What the step made and is on the device when memory is at the floor's peak, if it matters there.

    Args:
        finding: The floor.
        num: How many are listed at most.
    """
    shown = [each for each in finding.live if each.num_bytes > _NEGLIGIBLE * finding.floor_bytes][:num]
    table = make_table(
        f"The {len(shown)} largest storages there of {len(finding.live):,}", "module", "made by", ">size", "in"
    )
    for each in shown:
        op = each.op.removeprefix("aten.").removesuffix(".default")
        add_row(table, each.module or "-", op or "-", format_bytes(each.num_bytes), each.phase or "-")
    return table


def remedies_table(finding: FloorFinding, plan: MemoryPlan) -> Table:
    """What would lower a floor, with what is predicted of it.

    Args:
        finding: The floor.
        plan: A plan for the step, with the overhead that a remedy's is compared with.
    """
    table = make_table("What would lower it, predicted", "what", ">to", ">by", "then set by", ">overhead")
    for each in finding.remedies:
        to, by = or_dash(each.floor_bytes, "bytes"), or_dash(each.gain_bytes, "bytes")
        add_row(table, each.advice, to, by, each.floor_op or "-", format_share(each.overhead))
    if any(each.overhead is not None for each in finding.remedies):
        table.caption = f"overhead within the plan's budget; the plan's own is {format_share(overhead(plan))}"
        table.caption_justify = "left"
    return table


def comparison_table(outcomes: Sequence[PolicyOutcome]) -> Table:
    """Policies side by side, in the order given."""
    table = make_table("", "policy", ">peak", ">step time", ">overhead", ">traffic", ">recomputed")
    for outcome in outcomes:
        if outcome.step_seconds is None:
            add_row(
                table, outcome.policy, or_dash(outcome.floor_bytes, "bytes"), "infeasible", *("-",) * 3, style="dim"
            )
            continue
        add_row(
            table,
            outcome.policy,
            or_dash(outcome.peak_bytes, "bytes"),
            format_seconds(outcome.step_seconds),
            format_share(outcome.overhead),
            or_dash(outcome.traffic_bytes, "bytes"),
            or_dash(outcome.recompute_bytes, "bytes"),
        )
    if any(outcome.step_seconds is None for outcome in outcomes):
        table.caption, table.caption_justify = (
            "infeasible: the peak is the smallest budget that the policy meets",
            "left",
        )
    return table


def _measured_table(view: PlanView) -> Table:
    """Predicted figures beside measured ones."""
    table = make_table("Measured", "", ">predicted", ">measured")
    for label, kind, predicted, value in measured_rows(view):
        add_row(table, label, or_dash(predicted, kind), or_dash(value, kind))
    return table


def make_table(title: str, *columns: str) -> Table:
    """A table of :func:`add_row`; a column whose name begins with ">" holds figures: to the right, on one line."""
    from rich.table import Table

    made = Table(title=title or None, title_justify="left", title_style="bold")
    for column in columns:
        is_figure = column.startswith(">")
        made.add_column(
            column.removeprefix(">"), justify="right" if is_figure else "left", no_wrap=is_figure, overflow="fold"
        )
    return made


def add_row(made: Table, *cells: str, style: str = "") -> None:
    """Add a row of plain text: names are the user's, and may look like markup.

    The first column, which says what the row is about, gets room for it, up to what a long name can do with by folding:
    where a table is too wide for a terminal, other columns give way.
    """
    from rich.text import Text

    made.add_row(*(Text(cell) for cell in cells), style=style)
    first, length = made.columns[0], len(cells[0])
    first.min_width = max(first.min_width or 0, min(length, _MOST_MIN_WIDTH))
    first.no_wrap = made.row_count == 1 or first.no_wrap  # until there is a long name
    first.no_wrap &= length <= _MOST_MIN_WIDTH
