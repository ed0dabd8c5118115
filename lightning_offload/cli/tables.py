"""Tables of plans on the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lightning_offload.cli.figures import ModuleTotal, SavedStorage, bytes_by_action, gap, overhead
from lightning_offload.cli.output import console, duration, percent, say, size, two_columns
from lightning_offload.graph.memory_plan import MemoryPlan
from lightning_offload.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from lightning_offload.cli.setting import Checked
    from lightning_offload.cli.workload import Captured


def print_plan(checked: Checked, captured: Captured, plan: MemoryPlan, saved: Sequence[SavedStorage]) -> None:
    """Print what a new plan gives."""
    options, graph = checked.options, captured.graph
    title = f"{options.target}, batch {options.batch_size}, {options.dtype} on {checked.device.name}: {verdict(plan)}"
    say(title, style="bold")
    state = (
        f"{size(graph.persistent_bytes)} (parameters {size(captured.parameter_bytes)}, "
        f"{options.optimizer} state {size(captured.optimizer_bytes)})"
    )
    step = f"{len(graph.ops):,} ops, {len(saved):,} saved storages"
    rows = [("step", step), ("persistent state", state), *prediction_rows(plan), *action_rows(plan, saved)]
    console().print(two_columns(rows))


def verdict(plan: MemoryPlan) -> str:
    """Whether and how a step fits."""
    if plan.budget_bytes is None:
        return "no budget"
    if plan.predicted_peak_bytes > plan.budget_bytes:
        return f"does not fit {format_bytes(plan.budget_bytes)}"
    if not plan.decisions:
        return f"fits {format_bytes(plan.budget_bytes)} as it is"
    return f"fits {format_bytes(plan.budget_bytes)} at {percent(overhead(plan))} of step time"


def prediction_rows(plan: MemoryPlan) -> list[tuple[str, str]]:
    """What a plan predicts."""
    return [
        ("budget", size(plan.budget_bytes)),
        ("peak, plain", size(plan.plain_peak_bytes)),
        ("peak, planned", size(plan.predicted_peak_bytes)),
        ("smallest feasible budget", f"{size(plan.floor_bytes)}, set by {plan.floor_op}"),
        ("step time, plain", format_seconds(plan.plain_step_seconds)),
        ("step time, planned", f"{format_seconds(plan.predicted_step_seconds)} ({percent(overhead(plan))})"),
        ("waiting for copies", duration(plan.predicted_stall_seconds)),
        ("lower bound", f"{format_seconds(plan.bound_seconds)} (the plan is at {percent(gap(plan))})"),
    ]


def action_rows(plan: MemoryPlan, saved: Sequence[SavedStorage]) -> list[tuple[str, str]]:
    """What happens to what was saved."""
    totals = bytes_by_action(list(saved))
    counts = {action: sum(entry.action == action for entry in saved) for action in totals}
    where = f"{size(plan.predicted_host_bytes)} of host memory"
    if plan.predicted_disk_bytes:
        where += f", {size(plan.predicted_disk_bytes)} of disk"
    return [
        ("kept", f"{size(totals['keep'])} in {counts['keep']:,}"),
        ("swapped", f"{size(totals['swap'])} in {counts['swap']:,}, at most {where} at once"),
        ("recomputed", f"{size(totals['recompute'])} in {counts['recompute']:,}"),
    ]


def print_storages(saved: Sequence[SavedStorage]) -> None:
    """Print storages, each with who saved it and what happens to it."""
    from rich.table import Table

    if not saved:
        return
    say(f"\nThe {len(saved)} storages that would cost most to keep (bytes x time until they are needed)", style="bold")
    table = Table()
    table.add_column("module", overflow="fold")
    table.add_column("made by", overflow="fold")
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("idle", justify="right", no_wrap=True)
    table.add_column("action", no_wrap=True)
    for entry in saved:
        action = f"{entry.action} ({entry.tier})" if entry.tier is not None else entry.action
        idle = format_seconds(entry.idle_seconds)
        table.add_row(entry.module or "-", _short(entry.op), format_bytes(entry.num_bytes), idle, action)
    console().print(table)


def print_modules(totals: Sequence[ModuleTotal]) -> None:
    """Print what happens to what each module saved."""
    from rich.table import Table

    say("\nWhat each module saved, in the order of the step", style="bold")
    table = Table("module")
    for name in ("kept", "swapped", "recomputed"):
        table.add_column(name, justify="right", no_wrap=True)
    for total in totals:
        sizes = (total.keep_bytes, total.swap_bytes, total.recompute_bytes)
        table.add_row(total.module or "-", *(format_bytes(num_bytes) if num_bytes else "" for num_bytes in sizes))
    console().print(table)


def _short(op: str) -> str:
    return op.removeprefix("aten.").removesuffix(".default") or "-"
