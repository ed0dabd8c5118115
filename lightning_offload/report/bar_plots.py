"""The plots of totals: decisions by module, predicted against measured, and policies side by side.

They are written as :mod:`~lightning_offload.report.timeline_plots` says.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

from lightning_offload.graph.memory_plan import Action
from lightning_offload.report.plan_view import MeasuredStep, PlanView, PolicyOutcome
from lightning_offload.report.rows import module_rows
from lightning_offload.report.scale import bytes_unit, escape, format_share, label_margin, seconds_unit, shorten
from lightning_offload.report.timeline_plots import Plot, row_axis
from lightning_offload.units import format_bytes

__all__ = ["WORDS", "measured_plot", "measured_rows", "modules_plot", "policies_plot"]

WORDS: dict[Action, str] = {"keep": "kept", "swap": "swapped", "recompute": "recomputed"}
_LEGEND = {"orientation": "h", "x": 0, "y": 1, "yanchor": "bottom", "traceorder": "normal"}


def modules_plot(view: PlanView) -> Plot | None:
    """Saved bytes by module and action, the first module of forward on top; None where nothing is saved."""
    rows = module_rows(view.stored)
    if not rows:
        return None
    unit = bytes_unit(max(row.total_bytes for row in rows))
    places = list(range(len(rows), 0, -1))
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "name": WORDS[action],
            "y": places,
            "x": [round(row.num_bytes[action] / unit.size, 4) for row in rows],
            "text": [f"{escape(row.label)}<br><b>{format_bytes(row.num_bytes[action])}</b> {WORDS[action]} of "
                     f"{format_bytes(row.total_bytes)} in {row.num_storages} storages" for row in rows],
            "textposition": "none",
            "hovertemplate": "%{text}<extra></extra>",
            "marker": {"color": f"var(--{action})"},
        }
        for action in get_args(Action)
    ]  # fmt: skip
    labels, short = ([shorten(row.label, length) for row in rows] for length in (32, 16))
    return {
        "data": data,
        "layout": {
            "height": 22 * len(rows) + 110,
            "barmode": "stack",
            "bargap": 0.28,
            "hovermode": "closest",
            "margin": {"l": label_margin(labels), "r": 24, "t": 40, "b": 46},
            "legend": _LEGEND,
            "xaxis": {"title": {"text": f"saved bytes ({unit.name})"}, "rangemode": "tozero", "fixedrange": True},
            "yaxis": row_axis(labels),
        },
        "narrow": {"margin": {"l": label_margin(short), "r": 12, "t": 40, "b": 46},
                   "yaxis": {"ticktext": [escape(label) for label in short]}},
    }  # fmt: skip


def measured_rows(view: PlanView) -> list[tuple[str, str, float | None, float | None]]:
    """Predicted beside measured: label, "bytes" or "seconds", predicted, measured; without rows that know neither."""
    plan, m = view.plan, view.measured or MeasuredStep()
    rows: list[tuple[str, str, float | None, float | None]] = [
        ("forward peak", "bytes", view.forward_peak_bytes, m.forward_peak_bytes),
        ("backward peak", "bytes", view.backward_peak_bytes, m.backward_peak_bytes),
        ("optimizer peak", "bytes", None, m.optimizer_peak_bytes),
        ("peak of the step", "bytes", view.planned.peak_bytes, m.peak_bytes),
        ("host peak", "bytes", plan.predicted_host_bytes or None, m.host_peak_bytes or None),
        ("disk peak", "bytes", plan.predicted_disk_bytes or None, m.disk_peak_bytes or None),
        ("step time", "seconds", view.planned.step_seconds, m.step_seconds),
        ("stall time", "seconds", view.planned.stall_seconds, m.stall_seconds),
    ]
    return [row for row in rows if row[2] is not None or row[3] is not None]


def measured_plot(view: PlanView) -> Plot | None:
    """Peaks and times, predicted beside measured; None where nothing was measured."""
    rows = measured_rows(view)
    if all(measured is None for *_, measured in rows):
        return None
    by_kind = {kind: [row for row in rows if row[1] == kind] for kind in ("bytes", "seconds")}
    pixels = {kind: _ROW_PIXELS * len(chosen) for kind, chosen in by_kind.items()}
    height = sum(pixels.values()) + _GAP_PIXELS
    domains = {"bytes": [1 - pixels["bytes"] / height, 1.0], "seconds": [0.0, pixels["seconds"] / height]}
    data: list[dict[str, Any]] = []
    layout: dict[str, Any] = {
        "height": height + 40 + 46,
        "barmode": "group",
        "bargap": 0.3,
        "bargroupgap": 0.08,
        "hovermode": "closest",
        "margin": {"l": label_margin(row[0] for row in rows), "r": 24, "t": 40, "b": 46},
        "legend": _LEGEND,
    }
    for (kind, chosen), suffix, title in zip(by_kind.items(), ("", "2"), ("peak", "time"), strict=True):
        largest = max((value for row in chosen for value in row[2:] if value is not None), default=1)
        unit = bytes_unit(largest) if kind == "bytes" else seconds_unit(largest)
        for column, name in ((2, "predicted"), (3, "measured")):
            values = [row[column] for row in chosen]
            data.append({
                "type": "bar", "orientation": "h", "name": name, "legendgroup": name, "showlegend": kind == "bytes",
                "y": [row[0] for row in chosen],
                "x": [None if not isinstance(value, int | float) else value / unit.size for value in values],
                "xaxis": f"x{suffix}", "yaxis": f"y{suffix}", "marker": {"color": f"var(--{name})"},
                "hovertemplate": f"{name} %{{y}}: <b>%{{x:.3~f}} {unit.name}</b><extra></extra>",
            })  # fmt: skip
        layout[f"xaxis{suffix}"] = {"title": {"text": f"{title} ({unit.name})"}, "anchor": f"y{suffix}",
                                    "rangemode": "tozero", "fixedrange": True}  # fmt: skip
        layout[f"yaxis{suffix}"] = {"domain": domains[kind], "anchor": f"x{suffix}", "autorange": "reversed",
                                    "fixedrange": True, "showgrid": False, "ticklabelstandoff": 8}  # fmt: skip
    return {"data": data, "layout": layout}


_ROW_PIXELS, _GAP_PIXELS = 36, 64


def policies_plot(view: PlanView) -> Plot | None:
    """Overhead of each policy, the fastest on top; below, those that are infeasible. None without a comparison."""
    if not view.comparison:
        return None
    outcomes = sorted(view.comparison, key=lambda o: float("inf") if o.overhead is None else o.overhead)
    names = [shorten(o.policy, 22) for o in outcomes]
    shares = [100 * o.overhead for o in outcomes if o.overhead is not None]
    longest = max([1.0, *shares])
    return {
        "data": [bars for is_feasible in (True, False) if (bars := _bars(outcomes, view, is_feasible=is_feasible))],
        "layout": {
            "height": 26 * len(outcomes) + 80,
            "barmode": "overlay",
            "hovermode": "closest",
            "margin": {"l": label_margin(names), "r": 72, "t": 12, "b": 46},
            "xaxis": {"title": {"text": "step time beyond everything kept (%)"}, "fixedrange": True,
                      "range": [min([0.0, *shares]), 1.04 * longest]},
            "yaxis": row_axis(names),
        },
    }  # fmt: skip


def _bars(outcomes: Sequence[PolicyOutcome], view: PlanView, *, is_feasible: bool) -> dict[str, Any] | None:
    """A bar for each that is feasible, or a place without one for each that is not."""
    rows = [(y, o) for y, o in zip(range(len(outcomes), 0, -1), outcomes, strict=True)
            if (o.overhead is not None) == is_feasible]  # fmt: skip
    colors = [("accent" if o.policy == view.plan.policy else "predicted") if is_feasible else "grid" for _, o in rows]
    bars = {
        "type": "bar",
        "orientation": "h",
        "showlegend": False,
        "width": 0.62,
        "hovertemplate": "%{hovertext}<extra></extra>",
        "name": "feasible" if is_feasible else "infeasible",
        "y": [y for y, _ in rows],
        "x": [round(100 * (o.overhead or 0.0), 3) for _, o in rows],
        "marker": {"color": [f"var(--{color})" for color in colors]},
        "text": [_beside(o) for _, o in rows],
        "textposition": "outside",
        "textfont": {} if is_feasible else {"color": "var(--muted)"},
        "cliponaxis": False,
        "hovertext": [_outcome(o) for _, o in rows],
    }
    return bars if rows else None


def _beside(outcome: PolicyOutcome) -> str:
    if outcome.overhead is not None:
        return f" {format_share(outcome.overhead)}"
    return f" needs {format_bytes(outcome.floor_bytes)}" if outcome.floor_bytes is not None else " infeasible"


def _outcome(outcome: PolicyOutcome) -> str:
    name = escape(outcome.policy)
    if outcome.overhead is None or outcome.peak_bytes is None:
        floor = f"; its floor is {format_bytes(outcome.floor_bytes)}" if outcome.floor_bytes is not None else ""
        return f"<b>{name}</b>: infeasible{floor}"
    return f"<b>{name}</b>: {format_share(outcome.overhead)}, peak {format_bytes(outcome.peak_bytes)}"
