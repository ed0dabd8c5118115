"""The plots over time: memory, and under it the lanes, on one and the same axis.

A plot is a plain dict as plotly.js reads it. Colours are CSS variables such as ``var(--swap)``, which the page replaces
by those of its theme. All names in it are the user's and are escaped. What its layout has otherwise on a narrow screen
is beside the layout, under ``narrow``. Lines that mark a level are named in the legend, where no label hides a curve.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lightning_offload.planning.trace import Lane, Span, StepTrace
from lightning_offload.report.plan_view import PlanView
from lightning_offload.report.scale import Unit, bytes_unit, escape, seconds_unit, shorten
from lightning_offload.report.thinning import OpGroup, merge_spans, thin_curve
from lightning_offload.units import format_bytes, format_seconds

__all__ = ["NARROW_MARGINS", "Plot", "lanes_plot", "level_line", "memory_plot", "row_axis", "step_axis"]

Plot = dict[str, Any]

NUM_BINS = 500
"""Time is cut into so many; more can hardly be told apart on a screen, and make the page heavy."""

MARGIN_LEFT, MARGIN_RIGHT = 84, 24
NARROW_MARGINS = {"l": 70, "r": 12}


def step_axis(view: PlanView) -> tuple[Unit, list[float]]:
    """The unit of the time axis and its range, which all plots over time share."""
    longest = max(view.planned.step_seconds, view.plain.step_seconds) or 1e-6
    unit = seconds_unit(longest)
    return unit, [0.0, 1.005 * longest / unit.size]


# ---- memory


def memory_plot(view: PlanView) -> Plot:
    """Memory over time, plain and planned, with budget, floor and the boundary of the phases."""
    time, extent = step_axis(view)
    budget = view.plan.budget_bytes
    peak = max(view.planned.peak_bytes, view.plain.peak_bytes, view.plan.floor_bytes)
    shown = budget is not None and budget <= 1.4 * peak
    top = max(peak, budget if shown and budget is not None else 0)
    unit = bytes_unit(top)
    notes = _phase_notes(view, time)
    if budget is not None and not shown:
        notes.append({**_NOTE, "x": 1, "y": 1, "yref": "paper", "xanchor": "right", "yanchor": "top",
                      "text": f"budget {format_bytes(budget)}: far above"})  # fmt: skip
    return {
        "data": [
            _curve(view, view.plain, "everything kept", time, unit, color="plain", dash="dot"),
            _curve(view, view.planned, "under the plan", time, unit, color="compute", fill=True),
            *_levels(view, unit, shown, extent),
        ],
        "layout": {
            "height": 396,
            "hovermode": "x",
            "hoverdistance": -1,
            "margin": {"l": MARGIN_LEFT, "r": MARGIN_RIGHT, "t": 56, "b": 28},  # buttons, and below them the legend
            "legend": _LEGEND,
            "xaxis": {**_time_axis(time, extent), "title": None},
            "yaxis": {
                "title": {"text": f"live device memory ({unit.name})"},
                "range": [0, 1.12 * top / unit.size],
                "fixedrange": True,
            },
            "shapes": _boundary(view, time),
            "annotations": notes,
        },
        "narrow": {"height": 420, "margin": {**NARROW_MARGINS, "t": 84, "b": 28}},
    }


_LEGEND = {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"}
_NOTE = {"showarrow": False, "xref": "paper", "bgcolor": "var(--card)", "borderpad": 2, "opacity": 0.92}


def _time_axis(unit: Unit, extent: list[float]) -> dict[str, Any]:
    return {"title": {"text": f"time in the step ({unit.name})"}, "range": extent, "hoverformat": ".4~g"}


def _curve(
    view: PlanView, step: StepTrace, name: str, time: Unit, unit: Unit, *, color: str, dash: str = "solid",
    fill: bool = False,
) -> dict[str, Any]:  # fmt: skip
    chosen = thin_curve(step.tick_seconds, step.memory, NUM_BINS)
    xs = [round(float(step.tick_seconds[i]) / time.size, 5) for i in chosen]
    ys = [round(float(step.memory[i]) / unit.size, 4) for i in chosen]
    texts = [_where(view, i) for i in chosen]
    curve = {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "x": [*xs, round(step.step_seconds / time.size, 5)],
        "y": [*ys, ys[-1]],
        "text": [*texts, "end of the step"],
        "line": {"shape": "hv", "width": 2, "dash": dash, "color": f"var(--{color})"},
        "hovertemplate": f"<b>%{{y:.4~g}} {unit.name}</b> {name}<br>%{{text}}<extra></extra>",
    }
    return {**curve, "fill": "tozeroy", "fillcolor": f"var(--{color}-soft)"} if fill else curve


def _where(view: PlanView, tick: int) -> str:
    op = view.graph.op_at(tick)
    if op is None:
        return "end of the step"
    return f"{escape(shorten(op.module, 48)) or '(no module)'}<br>{escape(op.name)}"


def _boundary(view: PlanView, time: Unit) -> list[dict[str, Any]]:
    if view.planned.backward_seconds >= view.planned.step_seconds:
        return []
    at = view.planned.backward_seconds / time.size
    return [{"type": "line", "x0": at, "x1": at, "y0": 0, "y1": 1, "yref": "paper",
             "line": {"color": "var(--rule)", "width": 1.5}}]  # fmt: skip


def _phase_notes(view: PlanView, time: Unit) -> list[dict[str, Any]]:
    if view.planned.backward_seconds >= view.planned.step_seconds:
        return []
    at = {"x": view.planned.backward_seconds / time.size, "xref": "x", "y": 1, "yref": "paper", "yanchor": "top",
          "showarrow": False, "font": {"color": "var(--muted)"}}  # fmt: skip
    return [
        {**at, "text": "forward", "xanchor": "right", "xshift": -6},
        {**at, "text": "backward", "xanchor": "left", "xshift": 6},
    ]


def _levels(view: PlanView, unit: Unit, with_budget: bool, extent: list[float]) -> list[dict[str, Any]]:
    """The lines of the budget, if it is within the axis, and of the floor."""
    floor, budget = view.plan.floor_bytes, view.plan.budget_bytes
    lines = [("budget", budget, "solid")] if with_budget and budget is not None else []
    return [
        level_line(f"{name} {format_bytes(size)}", size / unit.size, extent, color=name, dash=dash)
        for name, size, dash in (*lines, ("floor", floor, "dash"))
    ]


def level_line(name: str, y: float, extent: Sequence[float], *, color: str, dash: str = "solid") -> dict[str, Any]:
    """A horizontal line that the legend names.

    Args:
        name: With its value.
        y: Its height.
        extent: Where it begins and where it ends.
        color: Name of its colour on the page.
        dash: How it is drawn.
    """
    return {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "x": list(extent),
        "y": [y, y],
        "line": {"width": 1.5, "dash": dash, "color": f"var(--{color})"},
        "hoverinfo": "skip",
    }


def row_axis(labels: Sequence[str]) -> dict[str, Any]:
    """The axis of horizontal bars, the first one on top at as many as there are."""
    return {
        "tickvals": list(range(len(labels), 0, -1)),
        "ticktext": [escape(label) for label in labels],
        "range": [0.4, len(labels) + 0.6],
        "fixedrange": True,
        "showgrid": False,
        "ticklabelstandoff": 8,
    }


# ---- lanes

_LANES: dict[Lane, str] = {
    "compute": "compute", "d2h": "D2H", "h2d": "H2D", "disk_write": "disk write", "disk_read": "disk read"
}  # fmt: skip
_KINDS = {
    "forward ops": "compute",
    "backward ops": "backward",
    "replay": "recompute",
    "stall": "stall",
    "slow-down by copies": "slowdown",
    "swap-out": "swap",
    "swap-in": "swap-in",
}
"""What spans are called, with their colours."""
_PATTERNS: Mapping[str, str] = {"stall": "/", "slow-down by copies": "x"}


def lanes_plot(view: PlanView) -> Plot:
    """What each lane does when; replays have a row of their own, though they run on the compute lane."""
    time, extent = step_axis(view)
    rows: dict[str, list[Span]] = {}
    for span in view.planned.spans:
        rows.setdefault("replay" if span.kind == "replay" else _LANES[span.lane], []).append(span)
    order = [name for name in ("compute", "replay", *list(_LANES.values())[1:]) if name in rows]
    min_seconds = extent[1] * time.size / NUM_BINS
    data = []
    for label, color in _KINDS.items():
        bars = {row: [span for span in spans if _kind(span) == label] for row, spans in rows.items()}
        blocks = [(row, block) for row, spans in bars.items() for block in merge_spans(spans, min_seconds)]
        if blocks:
            data.append(_bars(label, color, blocks, time, {row: len(order) - i for i, row in enumerate(order)}))
    height = 34 * len(order) + 112
    return {
        "data": data,
        "layout": {
            "height": height,
            "barmode": "overlay",
            "hovermode": "closest",
            "margin": {"l": MARGIN_LEFT, "r": MARGIN_RIGHT, "t": 50, "b": 46},
            "legend": {**_LEGEND, "y": 1 + 8 / max(1, height - 96)},
            "xaxis": _time_axis(time, extent),
            "yaxis": {**row_axis(order), "zeroline": False},
            "shapes": _boundary(view, time),
        },
        "narrow": {"height": height + 20 * len(data), "margin": {**NARROW_MARGINS, "t": 34 + 20 * len(data), "b": 46}},
    }


def _kind(span: Span) -> str:
    if span.kind == "op":
        return f"{span.phase} ops"
    if span.kind == "copy":
        return "swap-out" if span.lane in ("d2h", "disk_write") else "swap-in"
    return "slow-down by copies" if span.kind == "slowdown" else span.kind


def _bars(
    label: str, color: str, blocks: Iterable[tuple[str, OpGroup]], time: Unit, height: Mapping[str, int]
) -> dict[str, Any]:
    chosen = list(blocks)
    marker: dict[str, Any] = {"color": f"var(--{color})", "line": {"width": 0}}
    if label in _PATTERNS:
        marker["pattern"] = {"shape": _PATTERNS[label], "size": 5, "solidity": 0.35, "fgcolor": "var(--card)",
                             "fillmode": "overlay"}  # fmt: skip
    return {
        "type": "bar",
        "orientation": "h",
        "name": label,
        "y": [height[row] for row, _ in chosen],
        "base": [round(block.start_seconds / time.size, 5) for _, block in chosen],
        "x": [round((block.end_seconds - block.start_seconds) / time.size, 5) for _, block in chosen],
        "width": 0.62,
        "marker": marker,
        "text": [_about(label, block) for _, block in chosen],
        "textposition": "none",
        "hovertemplate": "%{text}<extra></extra>",
    }


def _about(label: str, block: OpGroup) -> str:
    modules = list(dict.fromkeys((block.first.module, block.last.module)))
    where = " … ".join(escape(shorten(module, 40)) for module in modules if module)
    count = f"{block.num_spans} spans, " if block.num_spans > 1 else ""
    size = f"{format_bytes(block.num_bytes)}, " if block.num_bytes else ""
    mostly = "mostly " if block.num_spans > 1 else ""
    lines = [f"<b>{label}</b>: {count}{size}{format_seconds(block.busy_seconds)}", where]
    if block.first.kind != "slowdown":
        lines.append(f"{mostly}{escape(block.name)}")
    return "<br>".join(line for line in lines if line)
