"""What a memory plugin knows about its step: predicted and measured figures, never mixed."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from lightning_offload.errors import PlanError
from lightning_offload.graph.device_spec import DeviceSpec
from lightning_offload.graph.memory_plan import Action, MemoryPlan
from lightning_offload.graph.step_graph import StepGraph
from lightning_offload.plugins.devices import nominal_spec
from lightning_offload.plugins.plan_entry import Phase, PlanEntry
from lightning_offload.plugins.plan_source import Imported
from lightning_offload.plugins.replanning import Reason
from lightning_offload.report.fields import Row, rich_table
from lightning_offload.report.printed import Printed
from lightning_offload.runtime import native
from lightning_offload.runtime.sight import engine_on
from lightning_offload.tensors import custom_ops
from lightning_offload.units import format_budget, format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.console import Group

    from lightning_offload.plugins.steps import Steps
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
class OtherShape:
    """Steps of a shape that needs less than another one.

    Attributes:
        shapes: The shapes of the tensors that the last of them was given.
        num_steps: How many there were.
        plain_peak_bytes: Predicted peak with everything kept.
        predicted_peak_bytes: Predicted peak under the plan.
        measured_peak_bytes: Peak of the last one that was measured; None for none.
    """

    shapes: tuple[tuple[int, ...], ...]
    num_steps: int
    plain_peak_bytes: int
    predicted_peak_bytes: int
    measured_peak_bytes: int | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Report(Printed):
    """Figures of a run, of the shape of step that needs most; None where one is not known yet. It prints as a table.

    Attributes:
        budget_bytes: The budget.
        floor_bytes: Smallest feasible budget, of all shapes.
        plain_peak_bytes: Predicted peak with everything kept.
        predicted_peak_bytes: Predicted peak under the plan.
        measured_peak_bytes: Peak of the last step of that shape that was measured.
        predicted_step_seconds: Predicted duration under the plan: by its ops, on an accelerator with what it has
            waited for the host, and on a host that computes, once three have run, by the last of them.
        measured_step_seconds: Duration of the last one.
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
        num_steps: Steps run, of all shapes.
        num_planned_steps: Those of them that ran under a plan.
        phase: What the last step did.
        num_mismatched: Storages whose replay did not give the same bits, and which are not recomputed any more.
        distrusted_ops: Custom ops of the step that are not run again, by name, each with what was seen of it.
        num_shapes: Different shapes of steps so far.
        num_at_first_sight: Those of them whose first step ran under a plan, extrapolated from those of other sizes.
        num_deviations: Steps that left their plan.
        replans: Final plans that were given up, by why; :data:`~lightning_offload.plugins.replanning.REASONS` has that
            in words.
        num_aligned: Steps under the plan for another structure, which they followed as far as they could.
        astray_bytes: What these saved that it did not have, in all.
        planning_seconds: Host time that plans took so far.
        scan_seconds: Host time that went into looking for what is on the device beside the steps.
        others: The other shapes of steps that have plans, by how many steps they had.
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
    replans: Mapping[Reason, int] = dataclasses.field(default_factory=dict)
    num_aligned: int = 0
    astray_bytes: int = 0
    planning_seconds: float = 0.0
    num_planned_steps: int = 0
    scan_seconds: float = 0.0
    others: tuple[OtherShape, ...] = ()
    distrusted_ops: tuple[tuple[str, str], ...] = ()
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
_FRAGMENTED = 1.1  # times what is used that the allocator holds: worth a line
_NUM_OTHERS = 4  # shapes that have a line
_ACTIONS: tuple[Action, ...] = ("keep", "swap", "recompute")


def make_report(steps: Steps, *, of_last: bool) -> Report:
    """The report of a run; cf. :meth:`~lightning_offload.plugins.memory.MemoryPlugin.report`.

    Args:
        steps: The run's.
        of_last: Whether of the shape of the last step, and not of that which needs most.
    """
    cache, budget_bytes = steps.cache, steps.budget_bytes
    entry = cache.entry if of_last else cache.neediest
    others, is_last = cache.others_than(entry), entry is cache.entry
    if entry.shown_plan is None and not is_last:  # steps run plainly, and nobody counted
        steps.look_ahead(entry)
    plan, graph, expected, seen = entry.shown_plan, entry.graph, entry.expected, entry.seen
    if (is_last and cache.phase in ("recording", "unplanned")) or not entry.source.follows_ops:
        # A plan there may be is not what the last step did.
        num_bytes: dict[Action, int] = {"keep": seen.stayed_bytes, "swap": seen.swapped_bytes, "recompute": 0}
    else:
        num_bytes = {action: plan.bytes_of(graph, action) if plan and graph else 0 for action in _ACTIONS}
    if graph is not None:  # as it was planned: with the margin
        graph = dataclasses.replace(entry.shown_graph, extra_bytes=graph.extra_bytes + entry.margin_bytes)
    made = [(k.shown_plan.floor_bytes, k.source.is_coarse) for k in (entry, *others) if k.shown_plan is not None]
    floors = [floor for floor, is_coarse in made if not is_coarse] or [floor for floor, _ in made]
    plain_peak_bytes = plan.plain_peak_bytes if plan else None
    if plan is None and not is_last and entry.baseline.is_known and steps.device is not None:  # nothing was to plan
        floor_bytes, plain_peak_bytes = entry.peaks_without_plan(nominal_spec(steps.device))
        floors.append(floor_bytes)
    tier_use = steps.hardware.use() if steps.hardware is not None else steps.tier_use
    optimizer_peak_bytes = steps.peaks.optimizer_peak_bytes or steps.state.optimizer_peak_bytes
    reserved_bytes = steps.peaks.reserved_bytes
    return Report(
        budget=steps.settings.budget,
        budget_bytes=budget_bytes,
        floor_bytes=max(floors, default=None),
        plain_peak_bytes=plain_peak_bytes,
        predicted_peak_bytes=plan.predicted_peak_bytes if plan else None,
        measured_peak_bytes=seen.measured_peak_bytes,
        predicted_step_seconds=expected.step if expected else None,
        measured_step_seconds=seen.step_seconds,
        plain_step_seconds=expected.plain if expected else None,
        bound_seconds=min(plan.bound_seconds + expected.plain - plan.plain_step_seconds, expected.step)
        if plan and expected
        else None,
        kept_bytes=num_bytes["keep"],
        swapped_bytes=num_bytes["swap"],
        recomputed_bytes=num_bytes["recompute"],
        **dataclasses.asdict(tier_use),
        stall_seconds=seen.stall_seconds,
        forward_peak_bytes=seen.forward_peak_bytes,
        backward_peak_bytes=seen.backward_peak_bytes,
        optimizer_peak_bytes=optimizer_peak_bytes,
        reserved_bytes=reserved_bytes,
        advice=_advice(seen.measured_peak_bytes, reserved_bytes, optimizer_peak_bytes, budget_bytes),
        policy=steps.settings.policy,
        num_steps=cache.num_steps,
        phase=cache.phase,
        num_mismatched=len(entry.mismatched),
        replans=cache.replans,
        **dataclasses.asdict(cache.figures),
        num_planned_steps=cache.num_planned,
        scan_seconds=steps.baseline.scan_seconds,
        others=tuple(map(_other_shape, others)),
        distrusted_ops=_distrusted(graph),
        engine=_engine_of(entry),
        planned=Planned(graph=graph, plan=plan, device=entry.made.spec) if graph and plan and entry.made.spec else None,
    )


def _distrusted(graph: StepGraph | None) -> tuple[tuple[str, str], ...]:
    names = {op.name for op in graph.ops} if graph is not None else set()
    return tuple(custom_ops.not_believed(names).items())


def _other_shape(entry: PlanEntry) -> OtherShape:
    plan = entry.shown_plan
    assert plan is not None
    return OtherShape(
        shapes=entry.input_shapes,
        num_steps=entry.seen.num_steps,
        plain_peak_bytes=plan.plain_peak_bytes,
        predicted_peak_bytes=plan.predicted_peak_bytes,
        measured_peak_bytes=entry.seen.measured_peak_bytes,
    )


def _engine_of(entry: PlanEntry) -> str:
    """What steps of a specialization run in once they are planned."""
    program = entry.program
    if isinstance(entry.source, Imported):
        return "python: the plan was made elsewhere"
    if program is not None and program.form_route is not None and entry.takes_data:
        return "python: the plan is for steps of several structures, which take Tensor.data"
    if program is not None and program.is_strict:
        return "python: the plan asks for something among the ops of backward"
    return engine_on(torch.device(entry.made.spec.kind)) if entry.made.spec is not None else native.engine()


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
    others = [(f"Also {_shapes(other)}", _peaks(other)) for other in report.others[:_NUM_OTHERS]]
    num_more = len(report.others) - len(others)
    more = f"{num_more:,} more, {sum(o.num_steps for o in report.others[_NUM_OTHERS:]):,} steps" if num_more > 0 else ""
    return plan_rows(report) + _known(
        ("State", _STATES.get(report.phase, "")),
        ("Engine", report.engine),
        ("Steps", f"{report.num_steps:,}"),
        ("Steps under a plan", f"{report.num_planned_steps:,}" if report.num_planned_steps else ""),
        ("Step measured", _seconds(report.measured_step_seconds)),
        ("Waiting for copies", _seconds(report.stall_seconds or None)),
        ("Optimizer's peak", _bytes(report.optimizer_peak_bytes)),
        ("Held by the allocator", _bytes(report.reserved_bytes)),
        ("Host memory, most in use", _bytes(report.host_peak_bytes or None)),
        ("Disk, most in use", _bytes(report.disk_peak_bytes or None)),
        ("Looking for other tensors", _seconds(report.scan_seconds or None)),
        ("Shapes of steps", f"{report.num_shapes:,}" if report.num_shapes > 1 else ""),
        *others,
        ("Other shapes", more),
        ("Steps that left their plan", f"{report.num_deviations:,}" if report.num_deviations else ""),
        ("Replans", ", ".join(f"{num:,} ({reason})" for reason, num in report.replans.items())),
        ("Replays that differed", replays),
        *((f"Not run again: {name}", why) for name, why in report.distrusted_ops),
    )


def _shapes(other: OtherShape) -> str:
    return ", ".join(map(str, other.shapes)) or "another shape"


def _peaks(other: OtherShape) -> str:
    measured = "" if other.measured_peak_bytes is None else f", measured {format_bytes(other.measured_peak_bytes)}"
    peaks = f"peak {format_bytes(other.predicted_peak_bytes)} (plain {format_bytes(other.plain_peak_bytes)}){measured}"
    return f"{other.num_steps:,} step{'s' * (other.num_steps != 1)}, {peaks}"


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
