"""The HTML report: one file with everything in it, which needs no network.

plotly.js comes with the package of that name, which the extra "report" installs. Whatever is the user's (module names,
device and policy names) is escaped; the page's own policy forbids it to load anything.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from importlib import resources

from lightning_offload import __version__
from lightning_offload.errors import UnsupportedError
from lightning_offload.graph.device_spec import DeviceSpec
from lightning_offload.graph.memory_plan import MemoryPlan
from lightning_offload.graph.step_graph import StepGraph
from lightning_offload.report.bar_plots import measured_plot, modules_plot, policies_plot
from lightning_offload.report.data import MeasuredStep, PlanView, PolicyOutcome, view_plan
from lightning_offload.report.files import check_path, write_text
from lightning_offload.report.page_parts import figures, footer, heading, lead, measured_table, storages_table
from lightning_offload.report.scale import escape
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
        comparison: The outcomes of several policies, of :func:`~.data.compare_policies`.

    Raises:
        ReportFileError: There is no writing to the path; nothing is left there.
        UnsupportedError: plotly is not installed.
        PlanError: The plan is one for another step.
    """
    target = check_path(path, (".html", ".htm"))
    script = _plotly_script()
    view = view_plan(graph, plan, device, measured=measured, comparison=comparison)
    write_text(target, _page(view, script))


def _plotly_script() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise UnsupportedError("HTML reports need plotly: pip install 'lightning-offload[report]'") from error
    script: str = get_plotlyjs()
    return script


def _page(view: PlanView, script: str) -> str:
    plots = {
        "memory": memory_plot(view),
        "lanes": lanes_plot(view),
        "modules": modules_plot(view),
        "measured": measured_plot(view),
        "policies": policies_plot(view),
    }
    drawn = {name: plot for name, plot in plots.items() if plot is not None}
    title = heading(view)
    return _fill(
        _part("page.html"),
        {
            "version": escape(__version__),
            "title": escape(title),
            "heading": escape(title),
            "lead": escape(lead(view)),
            "css": _part("page.css"),
            "js": _part("page.js"),
            "plotly": script,
            "plots": _json(drawn),
            "body": _body(view, drawn),
            "footer": escape(footer(view)),
        },
    )


def _part(name: str) -> str:
    return (resources.files("lightning_offload.report") / name).read_text(encoding="utf-8")


def _fill(template: str, parts: dict[str, str]) -> str:
    """Put parts in their places, once: what is in a part is left as it is."""
    pieces = template.split("@@")
    return "".join(parts[piece] if i % 2 else piece for i, piece in enumerate(pieces))


def _json(plots: dict[str, Plot]) -> str:
    """JSON that cannot end the script that it stands in."""
    text = json.dumps(plots, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _body(view: PlanView, drawn: dict[str, Plot]) -> str:
    sections = [figures(view)]
    sections.append(_section(
        "Memory over time",
        "Live device memory in one step, dotted with everything kept, filled under the plan, each on its own clock. "
        "Point at a curve for the layer; drag to zoom, double-click to go back.",
        _place(view, "memory", drawn), _place(view, "lanes", drawn),
    ))  # fmt: skip
    if "measured" in drawn:
        sections.append(_section(
            "Predicted against measured",
            "What the plan promised beside what the last measured steps took.",
            _place(view, "measured", drawn), measured_table(view),
        ))  # fmt: skip
    if "policies" in drawn:
        sections.append(_section(
            "Policies",
            "How much longer the step gets under each policy within the same budget. Grey ones cannot meet it.",
            _place(view, "policies", drawn),
        ))  # fmt: skip
    if "modules" in drawn:
        sections.append(_section(
            "Decisions by module",
            "What happens to the bytes that autograd saves, in the order of forward.",
            _place(view, "modules", drawn),
        ))  # fmt: skip
        sections.append(_section(
            "Largest saved storages",
            "Where most of the memory is, and what the plan does with it.",
            storages_table(view),
        ))  # fmt: skip
    return "\n".join(sections)


def _section(title: str, text: str, *parts: str) -> str:
    return f"<section>\n<h2>{escape(title)}</h2>\n<p>{escape(text)}</p>\n" + "\n".join(parts) + "\n</section>"


_LABELS = {
    "memory": "Memory over time",
    "lanes": "What each lane does over time",
    "measured": "Predicted and measured peaks and times",
    "policies": "Overhead of each policy",
    "modules": "Saved bytes by module and decision",
}


def _place(view: PlanView, name: str, drawn: dict[str, Plot]) -> str:
    label = f"{_LABELS[name]}. {lead(view)}" if name == "memory" else _LABELS[name]
    height = drawn[name]["layout"]["height"]
    return (
        f'<div class="plot" id="plot-{name}" role="img" aria-label="{escape(label)}" style="height:{height}px"></div>'
    )
