"""Throughput and peak against batch size, as an HTML page and as a picture, with the sizes that matter marked.

The page is made as that of a plan is, from the same parts; its two plots share their axis and zoom together. The
picture has the same plots in the page's colours, drawn by matplotlib, which is imported when one is asked for.
"""

from __future__ import annotations

import importlib
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_offload._version import __version__
from lightning_offload.errors import ReportFileError, UnsupportedError
from lightning_offload.report.files import check_path, write_text
from lightning_offload.report.html import cell, make_page, page_part, plot_place, plotly_script, section, table
from lightning_offload.report.scale import Unit, bytes_unit
from lightning_offload.report.timeline_plots import MARGIN_LEFT, NARROW_MARGINS, Plot, level_line
from lightning_offload.units import format_bytes

__all__ = ["TuningCurve", "TuningPoint", "save_tuning_html", "save_tuning_png", "tuning_plots"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningPoint:
    """A batch size, and what was measured or predicted of it; None where it was not.

    Attributes:
        batch_size: Samples of one step on one rank.
        is_predicted: Whether the figures are predicted.
        samples_per_second: Of all ranks together.
        peak_bytes: On one rank.
        is_feasible: Whether it fits.
        goodput: Samples per second by what a sample is worth at this size, by what it is at the configured one; None
            where that is not known.
    """

    batch_size: int
    is_predicted: bool
    samples_per_second: float | None
    peak_bytes: int | None
    is_feasible: bool
    goodput: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningCurve:
    """What a plot of a tuning shows.

    Attributes:
        points: Measured and predicted sizes, in any order.
        chosen: The chosen size.
        largest: The largest size that fits with the memory plan, or as the run is where there is none.
        largest_plain: The largest that fits without one; None where that is not known.
        budget_bytes: The budget, None for no limit.
        lead: What was chosen, in a sentence.
    """

    points: tuple[TuningPoint, ...]
    chosen: int
    largest: int | None
    largest_plain: int | None
    budget_bytes: int | None
    lead: str

    @property
    def has_goodput(self) -> bool:
        """Whether it is known what samples are worth."""
        return any(point.goodput is not None for point in self.points)

    def sorted_points(self, *, is_predicted: bool) -> list[TuningPoint]:
        """The measured or the predicted ones, by size."""
        return sorted((p for p in self.points if p.is_predicted == is_predicted), key=lambda p: p.batch_size)


def save_tuning_html(path: str | os.PathLike[str], curve: TuningCurve) -> None:
    """Write a page that needs nothing but a browser.

    Args:
        path: The file, ``.html``.
        curve: What to show.

    Raises:
        ReportFileError: There is no writing to the path; nothing is left there.
        UnsupportedError: plotly is not installed.
    """
    target = check_path(path, (".html", ".htm"))
    script = plotly_script()
    plots = tuning_plots(curve)
    page = make_page(
        script,
        topic="batch size",
        title=f"Batch size {curve.chosen}",
        lead=curve.lead,
        plots=plots,
        body=_body(curve, plots),
        footer=f"Measured on this device and predicted from a few recorded steps, lightning-offload {__version__}.",
    )
    write_text(target, page)


def save_tuning_png(path: str | os.PathLike[str], curve: TuningCurve) -> None:
    """Draw both plots into one picture.

    Args:
        path: The file, ``.png``.
        curve: What to show.

    Raises:
        ReportFileError: There is no writing to the path.
        UnsupportedError: matplotlib is not installed.
    """
    target = check_path(path, (".png",))
    try:
        # its Agg canvas is a figure's own, so no window system is asked
        figure_module = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise UnsupportedError("a PNG of trials needs matplotlib: pip install 'lightning-offload[plots]'") from error
    figure = figure_module.Figure(figsize=(8, 7), layout="constrained")
    colors = dict(re.findall(r"--([\w-]+): (#\w+);", page_part("page.css").partition("}")[0]))
    for axes, plot in zip(figure.subplots(2, 1, sharex=True), tuning_plots(curve).values(), strict=True):
        _draw(axes, plot, colors)
    try:
        figure.savefig(target, dpi=144)
    except OSError as error:
        raise ReportFileError(
            f"{str(target)!r} cannot be written ({error}): free space there or name another"
        ) from error


_DASHES = {"solid": "-", "dash": "--", "dot": ":"}
"""By plotly's name: matplotlib's."""


def _draw(axes: Any, plot: Plot, colors: Mapping[str, str]) -> None:
    def color(variable: str) -> str:
        return colors[variable.removeprefix("var(--").removesuffix(")")]

    for trace in plot["data"]:
        if trace["mode"] == "lines":
            line = trace["line"]
            dash = _DASHES[line.get("dash", "solid")]
            axes.plot(trace["x"], trace["y"], dash, color=color(line["color"]), label=trace["name"])
        else:
            axes.scatter(trace["x"], trace["y"], label=trace["name"], c=list(map(color, trace["marker"]["color"])))
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.set_xlabel(plot["layout"]["xaxis"]["title"]["text"])
    axes.set_ylabel(plot["layout"]["yaxis"]["title"]["text"])
    axes.set_ylim(bottom=0)
    axes.grid(visible=True, alpha=0.3)
    axes.legend(loc="best", fontsize="small")


def _body(curve: TuningCurve, plots: dict[str, Plot]) -> str:
    # the names are those of the plots that the page's script zooms together
    told = "Samples per second of all ranks against the batch size of one. Dots are measured, the line predicted."
    if curve.has_goodput:
        told += " Goodput is that by what a sample is worth in a batch of this size, by what it is as configured."
    sections = [
        section(
            "Throughput and goodput" if curve.has_goodput else "Throughput",
            told,
            plot_place("lanes", "Throughput against batch size", plots),
        ),
        section(
            "Peak memory",
            "Peak device memory of a training step against its batch size, under the same conditions.",
            plot_place("memory", "Peak memory against batch size", plots),
            _table(curve),
        ),
    ]
    return "\n".join(sections)


def _table(curve: TuningCurve) -> str:
    rows = (
        (
            str(p.batch_size),
            _speed(p.samples_per_second),
            *([_speed(p.goodput)] if curve.has_goodput else []),
            _bytes(p.peak_bytes),
            "yes" if p.is_feasible else "no",
        )
        for p in curve.sorted_points(is_predicted=False)
    )
    columns = ("batch size", "samples/s", *(["goodput"] if curve.has_goodput else []), "peak", "fits")
    return table(columns, (map(cell, row) for row in rows))


def tuning_plots(curve: TuningCurve) -> dict[str, Plot]:
    """The two plots, as plotly.js reads them: throughput under the name "lanes", peaks under "memory"."""
    largest = max([p.peak_bytes or 0 for p in curve.points] + [curve.budget_bytes or 0])
    unit = bytes_unit(largest)
    speeds = ("samples_per_second", "goodput") if curve.has_goodput else ("samples_per_second",)
    return {
        "lanes": _plot(curve, speeds, "samples per second", Unit(1.0, "samples/s")),
        "memory": _plot(curve, ("peak_bytes",), f"peak ({unit.name})", unit, curve.budget_bytes),
    }


def _trace(curve: TuningCurve, value: str, unit: Unit, *, is_predicted: bool) -> dict[str, Any]:
    points = [p for p in curve.sorted_points(is_predicted=is_predicted) if getattr(p, value) is not None]
    name, how = "predicted" if is_predicted else "measured", {"color": "var(--predicted)", "width": 2}
    color = "var(--measured)"
    if value == "goodput":
        name, color, how = f"goodput, {name}", "var(--accent)", {"color": "var(--accent)", "width": 2, "dash": "dash"}
    return {
        "type": "scatter",
        "mode": "lines" if is_predicted else "markers",
        "name": name,
        "x": [p.batch_size for p in points],
        "y": [round(getattr(p, value) / unit.size, 6) for p in points],
        "line": how,
        "marker": {
            "color": [color if p.is_feasible else "var(--stall)" for p in points],
            "symbol": ["circle" if p.is_feasible else "x" for p in points],
            "size": 9,
        },
        "hovertemplate": f"batch size %{{x}}, {name}: <b>%{{y:.4~g}} {unit.name}</b><extra></extra>",
    }


def _plot(curve: TuningCurve, values: Sequence[str], title: str, unit: Unit, budget_bytes: int | None = None) -> Plot:
    """The traces with the lines that mark sizes and the budget, all of which the legend names."""
    data = [_trace(curve, value, unit, is_predicted=is_predicted) for value in values for is_predicted in (True, False)]
    largest = "largest with plan" if curve.largest_plain is not None else "largest that fits"
    marks = [
        (size, f"{text}: {size}", color, dash)
        for size, text, color, dash in (
            (curve.chosen, "chosen", "accent", "solid"),
            (curve.largest, largest, "stall", "dash"),
            (curve.largest_plain, "largest without plan", "plain", "dot"),
        )
        if size is not None
    ]
    sizes = [p.batch_size for p in curve.points] + [size for size, *_ in marks]
    low, high = min(sizes), max(sizes)
    top = 1.06 * max([getattr(p, values[0]) or 0 for p in curve.points] + [budget_bytes or 0]) / unit.size or 1.0
    lines = [
        {"type": "scatter", "mode": "lines", "name": name, "hoverinfo": "skip", "x": [size] * 2, "y": [0, top],
         "line": {"color": f"var(--{color})", "width": 1.5, "dash": dash}}
        for size, name, color, dash in marks
    ]  # fmt: skip
    if budget_bytes is not None:
        name = f"budget {format_bytes(budget_bytes)}"
        lines.append(level_line(name, budget_bytes / unit.size, (low, high), color="budget"))
    margin = 0.04 * max(0.3, math.log10(high / low))
    layout = {
        "height": 360,
        "hovermode": "closest",
        "margin": {"l": MARGIN_LEFT, "r": 24, "t": 56, "b": 46},
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
        "xaxis": {"title": {"text": "batch size of one rank"}, "type": "log", "tickvals": _ticks(low, high),
                  "ticktext": [str(tick) for tick in _ticks(low, high)],
                  "range": [math.log10(low) - margin, math.log10(high) + margin]},
        "yaxis": {"title": {"text": title}, "range": [0, top], "fixedrange": True},
    }  # fmt: skip
    top_pixels = 30 + 20 * (len(data) + len(lines))
    narrow = {"height": 300 + top_pixels, "margin": {**NARROW_MARGINS, "t": top_pixels, "b": 46}}
    return {"data": [*lines, *data], "layout": layout, "narrow": narrow}


def _ticks(low: int, high: int) -> list[int]:
    """Powers of two, at most about a dozen of them."""
    powers = range(low.bit_length() - 1, high.bit_length() + 1)
    return [1 << power for power in powers[:: 1 + len(powers) // 12]]


def _speed(value: float | None) -> str:
    return "" if value is None else f"{value:,.1f}"


def _bytes(value: int | None) -> str:
    return "" if value is None else format_bytes(value)
