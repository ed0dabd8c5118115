"""The HTML report of a plan: its memory over time, its decisions, and what was measured under it."""

from __future__ import annotations

import os
from collections.abc import Sequence

from lightning_offload.graph.device_spec import DeviceSpec
from lightning_offload.graph.memory_plan import MemoryPlan
from lightning_offload.graph.step_graph import StepGraph
from lightning_offload.report.bar_plots import measured_plot, modules_plot, policies_plot
from lightning_offload.report.files import check_path, write_text
from lightning_offload.report.html import make_page, plot_place, plotly_script, section
from lightning_offload.report.page_parts import figures, footer, heading, lead, measured_table, storages_table
from lightning_offload.report.plan_view import MeasuredStep, PlanView, PolicyOutcome, view_plan
from lightning_offload.report.timeline_plots import Plot, lanes_plot, memory_plot

__all__ = ["save_plan_html"]


def save_plan_html(
    path: str | os.PathLike[str],
    graph: StepGraph,
    plan: MemoryPlan,
    device: DeviceSpec,
    *,
    measured: MeasuredStep | None = None,
    comparison: Sequence[PolicyOutcome] | None = None,
) -> None:
    """Write an HTML report of a plan.

    Args:
        path: The file, ``.html``.
        graph: The step.
        plan: The plan for it.
        device: Where it runs.
        measured: What was measured of steps under the plan, shown beside what was predicted.
        comparison: The outcomes of several policies, of :func:`~.plan_view.compare_policies`.

    Raises:
        ReportFileError: There is no writing to the path; nothing is left there.
        UnsupportedError: plotly is not installed.
        PlanError: The plan is one for another step.
    """
    target = check_path(path, (".html", ".htm"))
    script = plotly_script()
    view = view_plan(graph, plan, device, measured=measured, comparison=comparison)
    write_text(target, _page(view, script))


def _page(view: PlanView, script: str) -> str:
    plots = {
        "memory": memory_plot(view),
        "lanes": lanes_plot(view),
        "modules": modules_plot(view),
        "measured": measured_plot(view),
        "policies": policies_plot(view),
    }
    drawn = {name: plot for name, plot in plots.items() if plot is not None}
    return make_page(
        script,
        topic="memory plan",
        title=heading(view),
        lead=lead(view),
        plots=drawn,
        body=_body(view, drawn),
        footer=footer(view),
    )


def _body(view: PlanView, drawn: dict[str, Plot]) -> str:
    sections = [figures(view)]
    sections.append(section(
        "Memory over time",
        "Live device memory in one step, dotted with everything kept, filled under the plan, each on its own clock. "
        "Point at a curve for the layer; drag to zoom, double-click to go back.",
        _place(view, "memory", drawn), _place(view, "lanes", drawn),
    ))  # fmt: skip
    if "measured" in drawn:
        sections.append(section(
            "Predicted against measured",
            "What the plan promised beside what the last measured step took.",
            _place(view, "measured", drawn), measured_table(view),
        ))  # fmt: skip
    if "policies" in drawn:
        sections.append(section(
            "Policies",
            "How much longer the step gets under each policy within the budget; last, those that need more.",
            _place(view, "policies", drawn),
        ))  # fmt: skip
    if "modules" in drawn:
        sections.append(section(
            "Decisions by module",
            "What happens to the bytes that autograd saves, in the order of forward.",
            _place(view, "modules", drawn),
        ))  # fmt: skip
        sections.append(section(
            "Largest saved storages",
            "Where most of the memory is, and what the plan does with it.",
            storages_table(view),
        ))  # fmt: skip
    return "\n".join(sections)


_LABELS = {
    "memory": "Memory over time",
    "lanes": "What each lane does over time",
    "measured": "Predicted and measured peaks and times",
    "policies": "Overhead of each policy",
    "modules": "Saved bytes by module and decision",
}


def _place(view: PlanView, name: str, drawn: dict[str, Plot]) -> str:
    label = f"{_LABELS[name]}. {lead(view)}" if name == "memory" else _LABELS[name]
    return plot_place(name, label, drawn)
