"""Throughput and peak against batch size, as an HTML page, with the sizes that matter marked.

The page is made as that of a plan is, from the same parts; its two plots share their axis and zoom together.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Any

from lightning_offload._version import __version__
from lightning_offload.report.files import check_path, write_text
from lightning_offload.report.html import cell, make_page, plot_place, plotly_script, section, table
from lightning_offload.report.scale import bytes_unit
from lightning_offload.report.timeline_plots import MARGIN_LEFT, NARROW_MARGINS, Plot, level_line
from lightning_offload.units import format_bytes

__all__ = ["PlotMark", "TuningCurve", "TuningPoint", "marks_of", "save_tuning_html", "tuning_plots"]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class PlotMark:
    """A batch size that is marked in both plots.

    Attributes:
        batch_size: Where.
        text: What it is.
        color: Name of its colour on the page.
        png_color: Its colour in the PNG.
        dash: How its line is drawn.
    """

    batch_size: int
    text: str
    color: str
    png_color: str
    dash: str


def marks_of(curve: TuningCurve) -> list[PlotMark]:
    """The sizes to mark: the chosen one, and the largest that fit."""
    found = [PlotMark(batch_size=curve.chosen, text="chosen", color="accent", png_color="#1d5fa8", dash="solid")]
    if curve.largest is not None:
        text = "largest with plan" if curve.largest_plain is not None else "largest that fits"
        mark = PlotMark(batch_size=curve.largest, text=text, color="stall", png_color="#c8321f", dash="dash")
        found.append(mark)
    if curve.largest_plain is not None:
        plain = {"text": "largest without plan", "color": "plain", "png_color": "#7a8695", "dash": "dot"}
        found.append(PlotMark(batch_size=curve.largest_plain, **plain))
    return found


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
    speed = [
        _trace(curve, is_predicted=True, value="samples_per_second", size=1.0, suffix="samples/s"),
        _trace(curve, is_predicted=False, value="samples_per_second", size=1.0, suffix="samples/s"),
    ]
    if curve.has_goodput:
        speed += [
            _trace(curve, is_predicted=is_predicted, value="goodput", size=1.0, suffix="samples/s")
            for is_predicted in (True, False)
        ]
    peak = [
        _trace(curve, is_predicted=True, value="peak_bytes", size=unit.size, suffix=unit.name),
        _trace(curve, is_predicted=False, value="peak_bytes", size=unit.size, suffix=unit.name),
    ]
    return {
        "lanes": _plot(curve, speed, "samples per second", "samples_per_second", 1.0),
        "memory": _plot(curve, peak, f"peak ({unit.name})", "peak_bytes", unit.size, curve.budget_bytes),
    }


def _trace(curve: TuningCurve, *, is_predicted: bool, value: str, size: float, suffix: str) -> dict[str, Any]:
    points = curve.sorted_points(is_predicted=is_predicted)
    points = [p for p in points if getattr(p, value) is not None]
    name, how = "predicted" if is_predicted else "measured", {"color": "var(--predicted)", "width": 2}
    color = "var(--measured)"
    if value == "goodput":
        name, color, how = f"goodput, {name}", "var(--accent)", {"color": "var(--accent)", "width": 2, "dash": "dash"}
    return {
        "type": "scatter",
        "mode": "lines" if is_predicted else "markers",
        "name": name,
        "x": [p.batch_size for p in points],
        "y": [round(getattr(p, value) / size, 6) for p in points],
        "line": how,
        "marker": {
            "color": [color if p.is_feasible else "var(--stall)" for p in points],
            "symbol": ["circle" if p.is_feasible else "x" for p in points],
            "size": 9,
        },
        "hovertemplate": f"batch size %{{x}}, {name}: <b>%{{y:.4~g}} {suffix}</b><extra></extra>",
    }


def _plot(
    curve: TuningCurve, data: list[dict[str, Any]], title: str, value: str, size: float, budget_bytes: int | None = None
) -> Plot:
    """The traces with the lines that mark sizes and the budget, all of which the legend names."""
    marks = marks_of(curve)
    sizes = [p.batch_size for p in curve.points] + [mark.batch_size for mark in marks]
    low, high = min(sizes), max(sizes)
    top = 1.06 * max([getattr(p, value) or 0 for p in curve.points] + [budget_bytes or 0]) / size or 1.0
    lines = [
        {"type": "scatter", "mode": "lines", "name": f"{mark.text}: {mark.batch_size}", "hoverinfo": "skip",
         "x": [mark.batch_size] * 2, "y": [0, top],
         "line": {"color": f"var(--{mark.color})", "width": 1.5, "dash": mark.dash}}
        for mark in marks
    ]  # fmt: skip
    if budget_bytes is not None:
        name = f"budget {format_bytes(budget_bytes)}"
        lines.append(level_line(name, budget_bytes / size, (low, high), color="budget"))
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
