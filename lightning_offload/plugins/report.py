"""What a memory plugin knows about its step: predicted and measured figures, never mixed."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING

import torch

from lightning_offload.errors import PlanError
from lightning_offload.graph.device_spec import DeviceSpec
from lightning_offload.graph.memory_plan import Action, MemoryPlan
from lightning_offload.graph.step_graph import StepGraph
from lightning_offload.plugins.plan_cache import ShapeFigures
from lightning_offload.plugins.plan_entry import Phase, PlanEntry
from lightning_offload.plugins.settings import Budget
from lightning_offload.report.fields import Row, rich_table
from lightning_offload.report.printed import Printed
from lightning_offload.runtime import native
from lightning_offload.runtime.sight import engine_on
from lightning_offload.units import format_budget, format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.console import Group

    from lightning_offload.plugins.hardware import TierUse
    from lightning_offload.report import MeasuredStep


TITLE = "Offload plan"
"""Of the table of a report."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A step, its plan, and the device that it was planned for, its links at the rates that the plan counts on."""

    graph: StepGraph
    plan: MemoryPlan
    device: DeviceSpec


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Report(Printed):
    """Figures of the last step's shape; None where a figure is not known yet. It prints as a table.

    Attributes:
        budget_bytes: The budget.
        floor_bytes: Smallest feasible budget.
        plain_peak_bytes: Predicted peak with everything kept.
        predicted_peak_bytes: Predicted peak under the plan.
        measured_peak_bytes: Peak of the last step that was measured.
        predicted_step_seconds: Predicted duration under the plan: by its ops, on an accelerator with what it has
            waited for the host, and on a host that computes, once three have run, by the last of them.
        measured_step_seconds: Duration of the last step.
        plain_step_seconds: Predicted duration with everything kept: by its ops, or by these steps, without what
            replays, copies and waiting took of them.
        bound_seconds: Lower bound on the duration of any plan within the budget, above the plain step's as it is shown.
        kept_bytes: Saved bytes that stay on the device, under the plan; without one of the step's own, those that did.
        swapped_bytes: Saved bytes that are swapped, under the plan; without one of the step's own, those that were.
        recomputed_bytes: Saved bytes that are recomputed.
        host_peak_bytes: Most host memory that held swapped tensors at once.
        host_bytes: Host memory mapped for them.
        pinned_bytes: How much of that is page-locked.
        disk_peak_bytes: Most bytes of the spill file that held swapped tensors at once.
        disk_bytes: Size of the spill file.
        stall_seconds: Time that compute waited for copies, in the last step where that was measured.
        forward_peak_bytes: Measured peak of forward.
        backward_peak_bytes: Measured peak of backward.
        optimizer_peak_bytes: Highest peak of an optimizer's step after a measured one; before there was one, on a CPU,
            what the state, parameters and gradients take together.
        reserved_bytes: What the device's allocator holds, in use or not; None on a CPU.
        advice: What would make more of the device's memory usable, for people to read.
        policy: Who planned.
        num_steps: Steps run.
        phase: What the last step did.
        num_mismatched: Storages whose replay did not give the same bits, and which are not recomputed any more.
        num_shapes: Different shapes of steps so far.
        num_at_first_sight: Those of them whose first step ran under a plan, derived from those of other sizes.
        num_deviations: Steps that left their plan.
        num_aligned: Steps under the plan for another structure, which they followed as far as they could.
        astray_bytes: What these saved that it did not have, in all.
        planning_seconds: Host time that plans took so far.
        engine: What steps under a plan run in: "native", or "python: " and why not in the native core.
        planned: The step with its plan, once there is one.
        budget: The budget as it was asked for.
    """

    budget_bytes: int | None
    floor_bytes: int | None
    plain_peak_bytes: int | None
    predicted_peak_bytes: int | None
    measured_peak_bytes: int | None
    predicted_step_seconds: float | None
    measured_step_seconds: float | None
    plain_step_seconds: float | None
    bound_seconds: float | None
    kept_bytes: int
    swapped_bytes: int
    recomputed_bytes: int
    host_peak_bytes: int
    host_bytes: int
    pinned_bytes: int
    disk_peak_bytes: int
    disk_bytes: int
    stall_seconds: float
    forward_peak_bytes: int | None
    backward_peak_bytes: int | None
    optimizer_peak_bytes: int | None
    reserved_bytes: int | None
    advice: tuple[str, ...]
    policy: str
    num_steps: int
    phase: Phase
    num_mismatched: int
    num_shapes: int = 0
    num_at_first_sight: int = 0
    num_deviations: int = 0
    num_aligned: int = 0
    astray_bytes: int = 0
    planning_seconds: float = 0.0
    engine: str = ""
    planned: Planned | None = dataclasses.field(default=None, repr=False, compare=False)
    budget: int | float | str | None = None

    def __rich__(self) -> Group:
        """The table, and advice where there is any."""
        from rich.console import Group
        from rich.text import Text

        return Group(rich_table(report_rows(self), TITLE), *(Text(f"Advice: {advice}.") for advice in self.advice))

    def metrics(self, prefix: str = "offload/") -> dict[str, float]:
        """The figures that are known, for a logger.

        Args:
            prefix: What their names begin with.
        """
        values: dict[str, float | None] = {
            "peak_bytes": self.measured_peak_bytes,
            "step_seconds": self.measured_step_seconds,
            **{name: getattr(self, name) for name in _METRICS},
        }
        return {f"{prefix}{name}": value for name, value in values.items() if value is not None}

    def save_html(self, path: str | os.PathLike[str]) -> None:
        """Write a page that shows the plan and what was measured of it; it needs nothing but a browser.

        Args:
            path: Where to, ending in ".html".

        Raises:
            PlanError: No step was planned yet.
            ReportFileError: The file cannot be written.
            UnsupportedError: plotly is not installed.
        """
        from lightning_offload.report import save_plan_html

        planned = self._planned()
        save_plan_html(path, planned.graph, planned.plan, planned.device, measured=self._measured())

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Write the planned step as a trace for Perfetto or chrome://tracing.

        Args:
            path: Where to, ending in ".json".

        Raises:
            PlanError: No step was planned yet.
            ReportFileError: The file cannot be written.
        """
        from lightning_offload.report import save_plan_trace

        planned = self._planned()
        save_plan_trace(path, planned.graph, planned.plan, planned.device)

    def _planned(self) -> Planned:
        if self.planned is None:
            raise PlanError("there is no plan to show yet: run a step (forward and backward) under the plugin first")
        return self.planned

    def _measured(self) -> MeasuredStep:
        from lightning_offload.report import MeasuredStep

        return MeasuredStep(
            step_seconds=self.measured_step_seconds,
            stall_seconds=self.stall_seconds,
            peak_bytes=self.measured_peak_bytes,
            forward_peak_bytes=self.forward_peak_bytes,
            backward_peak_bytes=self.backward_peak_bytes,
            optimizer_peak_bytes=self.optimizer_peak_bytes,
            host_peak_bytes=self.host_peak_bytes,
            disk_peak_bytes=self.disk_peak_bytes,
            engine=self.engine or None,
        )

    @property
    def host_waste(self) -> float | None:
        """Host memory mapped for each byte of it that is used at most; None where nothing is."""
        return self.host_bytes / self.host_peak_bytes if self.host_peak_bytes else None


_METRICS = (
    "budget_bytes", "stall_seconds", "kept_bytes", "swapped_bytes", "recomputed_bytes", "host_peak_bytes", "num_shapes",
    "num_at_first_sight", "num_deviations", "num_aligned", "astray_bytes", "planning_seconds",
)  # fmt: skip
_FRAGMENTED = 1.1
_ACTIONS: tuple[Action, ...] = ("keep", "swap", "recompute")


def make_report(
    kind: PlanEntry,
    *,
    budget: Budget,
    budget_bytes: int | None,
    measured_step_seconds: float | None,
    stall_seconds: float,
    tier_use: TierUse,
    optimizer_peak_bytes: int | None,
    reserved_bytes: int | None,
    policy: str,
    num_steps: int,
    phase: Phase,
    shapes: ShapeFigures,
) -> Report:
    """The report of a kind of step, from its plan and from what the plugin measured."""
    plan, graph, expected = kind.plan or kind.superseded, kind.graph, kind.expected
    if phase in ("recording", "unplanned") or kind.aligns:  # a plan there may be is not what the last step did
        num_bytes: dict[Action, int] = {"keep": kind.stayed_bytes, "swap": kind.swapped_bytes, "recompute": 0}
    else:
        num_bytes = {action: plan.bytes_of(graph, action) if plan and graph else 0 for action in _ACTIONS}
    if graph is not None:  # as it was planned: with the margin
        graph = dataclasses.replace(kind.shown_graph, extra_bytes=graph.extra_bytes + kind.margin_bytes)
    return Report(
        budget=budget,
        budget_bytes=budget_bytes,
        floor_bytes=plan.floor_bytes if plan else None,
        plain_peak_bytes=plan.plain_peak_bytes if plan else None,
        predicted_peak_bytes=plan.predicted_peak_bytes if plan else None,
        measured_peak_bytes=kind.measured_peak_bytes,
        predicted_step_seconds=expected.step if expected else None,
        measured_step_seconds=measured_step_seconds,
        plain_step_seconds=expected.plain if expected else None,
        bound_seconds=min(plan.bound_seconds + expected.plain - plan.plain_step_seconds, expected.step)
        if plan and expected
        else None,
        kept_bytes=num_bytes["keep"],
        swapped_bytes=num_bytes["swap"],
        recomputed_bytes=num_bytes["recompute"],
        **dataclasses.asdict(tier_use),
        stall_seconds=stall_seconds,
        forward_peak_bytes=kind.forward_peak_bytes,
        backward_peak_bytes=kind.backward_peak_bytes,
        optimizer_peak_bytes=optimizer_peak_bytes,
        reserved_bytes=reserved_bytes,
        advice=_advice(kind.measured_peak_bytes, reserved_bytes, optimizer_peak_bytes, budget_bytes),
        policy=policy,
        num_steps=num_steps,
        phase=phase,
        num_mismatched=len(kind.mismatched),
        num_shapes=shapes.num_shapes,
        num_at_first_sight=shapes.num_at_first_sight,
        num_deviations=shapes.num_deviations,
        num_aligned=shapes.num_aligned,
        astray_bytes=shapes.astray_bytes,
        planning_seconds=shapes.planning_seconds,
        engine=_engine_of(kind),
        planned=Planned(graph=graph, plan=plan, device=kind.spec) if graph and plan and kind.spec else None,
    )


def _engine_of(kind: PlanEntry) -> str:
    """What steps of a kind run in once they are planned."""
    program = kind.program
    if kind.given_plan is not None:
        return "python: the plan was made elsewhere"
    if program is not None and program.form_route is not None:
        return "python: the plan is for steps of several structures"
    if program is not None and program.is_strict:
        return "python: the plan asks for something among the ops of backward"
    return engine_on(torch.device(kind.spec.kind)) if kind.spec is not None else native.engine()


def _advice(measured: int | None, reserved: int | None, optimizer: int | None, budget: int | None) -> tuple[str, ...]:
    found = []
    used = max(measured or 0, optimizer or 0)
    if reserved is not None and used and reserved > _FRAGMENTED * used:
        found.append(
            f"the allocator holds {format_bytes(reserved)} for a peak of {format_bytes(used)}: "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True avoids most of such fragmentation"
        )
    if budget is not None and optimizer is not None and optimizer > max(budget, measured or 0):
        found.append(
            f"the optimizer's step peaks at {format_bytes(optimizer)}, above the budget: "
            "foreach=False or fused=True avoids its temporaries"
        )
    return tuple(found)


# ---- as a table

_STATES = {
    "idle": "no step yet",
    "recording": "recording the first step, no plan yet",
    "verifying": "checking the plan's replays",
    "measuring": "measuring, the plan may change",
    "unplanned": "no plan: the steps' ops change, or no plan is within the budget",
}


def plan_rows(report: Report) -> list[Row]:
    """Describe the plan in a report, one (label, value) pair per line, unknown values left out."""
    budget = "" if report.budget_bytes is None else format_budget(report.budget_bytes, report.budget)
    return _known(
        ("Budget", budget),
        ("Smallest feasible budget", _bytes(report.floor_bytes)),
        ("Peak without a plan", _bytes(report.plain_peak_bytes)),
        ("Peak predicted", _bytes(report.predicted_peak_bytes)),
        ("Peak measured", _bytes(report.measured_peak_bytes)),
        ("Kept on the device", _bytes(report.kept_bytes)),
        ("Swapped", _bytes(report.swapped_bytes)),
        ("Recomputed", _bytes(report.recomputed_bytes)),
        ("Step predicted", _step(report)),
        ("Step, lower bound", _seconds(report.bound_seconds)),
        ("Policy", report.policy),
    )


def report_rows(report: Report) -> list[Row]:
    """The same, and what steps under the plan were seen to do."""
    replays = f"{report.num_mismatched:,} storages" if report.num_mismatched else ""
    return plan_rows(report) + _known(
        ("State", _STATES.get(report.phase, "")),
        ("Engine", report.engine),
        ("Steps", f"{report.num_steps:,}"),
        ("Step measured", _seconds(report.measured_step_seconds)),
        ("Waiting for copies", _seconds(report.stall_seconds or None)),
        ("Optimizer's peak", _bytes(report.optimizer_peak_bytes)),
        ("Held by the allocator", _bytes(report.reserved_bytes)),
        ("Host memory, most in use", _bytes(report.host_peak_bytes or None)),
        ("Disk, most in use", _bytes(report.disk_peak_bytes or None)),
        ("Shapes of steps", f"{report.num_shapes:,}" if report.num_shapes > 1 else ""),
        ("Steps that left their plan", f"{report.num_deviations:,}" if report.num_deviations else ""),
        ("Replays that differed", replays),
    )


def _known(*rows: Row) -> list[Row]:
    return [(label, value) for label, value in rows if value]


def _bytes(value: int | None) -> str:
    return "" if value is None else format_bytes(value)


def _seconds(value: float | None) -> str:
    return "" if value is None else format_seconds(value)


def _step(report: Report) -> str:
    """The predicted step time with what the plan adds to the plain step."""
    predicted, plain = report.predicted_step_seconds, report.plain_step_seconds
    if predicted is None or not plain:
        return _seconds(predicted)
    return f"{format_seconds(predicted)} ({predicted / plain - 1:+.1%})"
