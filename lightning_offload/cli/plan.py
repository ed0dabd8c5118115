"""``plan``: capture a step without running it, plan it for a device, say what that gives, and write the plan."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_offload import report
from lightning_offload.cli.options import PlanOptions
from lightning_offload.cli.output import check_writable, console, progress, say, write_file, write_json
from lightning_offload.cli.setting import Checked, check_options, kept_storages
from lightning_offload.errors import UnsupportedError
from lightning_offload.graph.device_spec import DeviceSpec
from lightning_offload.graph.memory_plan import MemoryPlan
from lightning_offload.graph.step_graph import StepGraph
from lightning_offload.planning.planner import plan as make_plan
from lightning_offload.report.files import check_path
from lightning_offload.report.html import plotly_script
from lightning_offload.report.plan_view import Stored, action_bytes, costliest, predictions, stored_in, verdict
from lightning_offload.report.tables import action_rows, prediction_rows, storages_table, two_columns
from lightning_offload.units import format_bytes

if TYPE_CHECKING:
    from lightning_offload.cli.workload import Captured

NUM_SHOWN = 10
"""Storages that are listed by name."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    """Files to write; None for none.

    Attributes:
        plan: The plan.
        graph: The step that it is for, which gives ``explain`` names and sizes.
        report: A page with plots.
        trace: A trace for Perfetto.
    """

    plan: Path | None
    graph: Path | None
    report: Path | None
    trace: Path | None

    def check(self) -> None:
        """Check that each can be written, and a page made.

        Raises:
            UnsupportedError: One cannot, two are one file, or a page needs an extra that is not installed.
            ReportFileError: A page or a trace has another extension than they have.
        """
        named = (("--output", self.plan), ("--graph", self.graph), ("--report", self.report), ("--trace", self.trace))
        options: dict[Path, str] = {}
        for option, path in named:
            check_writable(option, path)
            if path is not None and (other := options.setdefault(path.resolve(), option)) != option:
                raise UnsupportedError(
                    f"{other} and {option} would both be written to {str(path)!r}: name another file for one of them"
                )
        if self.report is not None:
            check_path(self.report, (".html", ".htm"))
            plotly_script()
        if self.trace is not None:
            check_path(self.trace, (".json",))

    def paths(self) -> dict[str, str | None]:
        """Where the files are, for JSON."""
        fields = dataclasses.fields(self)
        return {f"{field.name}_path": _text(getattr(self, field.name)) for field in fields}


def plan_step(options: PlanOptions, outputs: Outputs, *, as_json: bool) -> None:
    """Plan a step and print what that gives.

    Args:
        options: What to plan.
        outputs: Which files to write.
        as_json: Whether to print JSON in place of tables.

    Raises:
        BudgetInfeasibleError: No plan meets the budget; names the smallest that one meets.
        OffloadError: An option is wrong.
    """
    outputs.check()
    checked = check_options(options)
    with progress(f"capturing a step of {options.target}") as tell:
        begin = time.perf_counter()
        captured = checked.workload.capture(options.batch_size, checked.device)
        captured_at = time.perf_counter()
        tell(f"planning {len(captured.graph.ops)} ops")
        plan = planned(checked, captured.graph)
        planned_at = time.perf_counter()
        tell("writing files")
        write_outputs(outputs, captured.graph, plan, checked.device)
    seconds = {"capture_seconds": captured_at - begin, "planning_seconds": planned_at - captured_at}
    saved = stored_in(captured.graph, plan)
    if as_json:
        payload = checked.header | predictions(plan) | state_of(captured) | seconds
        storages = {"storages": [each.state_dict() for each in costliest(saved)[:NUM_SHOWN]]}
        write_json(payload | action_bytes(saved) | storages | outputs.paths())
        return
    _print(checked, captured, plan, saved)
    _print_files(outputs)


def _print(checked: Checked, captured: Captured, plan: MemoryPlan, saved: Sequence[Stored]) -> None:
    options, graph = checked.options, captured.graph
    title = f"{options.target}, batch {options.batch_size}, {options.dtype} on {checked.device.name}"
    title += f": {verdict(plan, options.budget)}"
    say(title, style="bold")
    state = (
        f"{format_bytes(graph.persistent_bytes)} (parameters {format_bytes(captured.parameter_bytes)}, "
        f"{checked.workload.loop.optimizer} state {format_bytes(captured.optimizer_bytes)})"
    )
    step = f"{len(graph.ops):,} ops, {len(saved):,} saved storages"
    rows = [
        ("step", step),
        ("persistent state", state),
        *prediction_rows(plan, options.budget),
        *action_rows(plan, saved),
    ]
    console().print(two_columns(rows))
    if saved:
        console().print(storages_table(saved, NUM_SHOWN))


def planned(checked: Checked, graph: StepGraph, policy: str | None = None) -> MemoryPlan:
    """The plan of a policy, by default the one that was asked for.

    Raises:
        BudgetInfeasibleError: It cannot meet the budget.
    """
    return make_plan(
        graph,
        checked.device,
        checked.budget_bytes,
        policy=policy or checked.options.policy,
        keep=kept_storages(graph, checked.options.keep),
    )


def state_of(captured: Captured) -> dict[str, Any]:
    """What lies on the device for good, for JSON."""
    return {
        "persistent_bytes": captured.graph.persistent_bytes,
        "parameter_bytes": captured.parameter_bytes,
        "optimizer_bytes": captured.optimizer_bytes,
        "num_ops": len(captured.graph.ops),
    }


def write_outputs(outputs: Outputs, graph: StepGraph, plan: MemoryPlan, device: DeviceSpec) -> None:
    """Write the files that were asked for.

    Raises:
        UnsupportedError: One cannot be written.
        ReportFileError: A page or a trace cannot.
    """
    if outputs.plan is not None:
        write_file("--output", outputs.plan, plan.to_json())
    if outputs.graph is not None:
        write_file("--graph", outputs.graph, graph.to_json())
    if outputs.report is not None:
        report.save_plan_html(outputs.report, graph, plan, device)
    if outputs.trace is not None:
        report.save_plan_trace(outputs.trace, graph, plan, device)


def _print_files(outputs: Outputs) -> None:
    labels = {"plan": "plan for MemoryPlugin(plan=...)", "graph": "its step", "report": "report", "trace": "trace"}
    written = [
        f"{getattr(outputs, name)} ({label})" for name, label in labels.items() if getattr(outputs, name) is not None
    ]
    if written:
        say(f"\nWrote {', '.join(written)}.")
    if outputs.plan is None:
        say("\nThe plan was not written: --output plan.json writes it, for MemoryPlugin(plan=...) and `explain`.")


def _text(path: Path | None) -> str | None:
    return str(path) if path is not None else None
