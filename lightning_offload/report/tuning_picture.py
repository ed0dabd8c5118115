"""Throughput and peak against batch size as a PNG; matplotlib is imported when one is asked for."""

from __future__ import annotations

import importlib
import os
from typing import Any

from lightning_offload.errors import ReportFileError, UnsupportedError
from lightning_offload.report.files import check_path
from lightning_offload.report.scale import bytes_unit
from lightning_offload.report.tuning_plot import TuningCurve, marks_of

__all__ = ["save_tuning_png"]


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
    unit = bytes_unit(max([p.peak_bytes or 0 for p in curve.points] + [curve.budget_bytes or 0]))
    upper, lower = figure.subplots(2, 1, sharex=True)
    _draw(upper, curve, "samples_per_second", 1.0, "samples per second")
    if curve.has_goodput:
        _points(upper, curve, "goodput", 1.0, "goodput, ", color="#b5651d")
    _draw(lower, curve, "peak_bytes", unit.size, f"peak ({unit.name})")
    if curve.budget_bytes is not None:
        lower.axhline(curve.budget_bytes / unit.size, color="black", linewidth=1, label="budget")
    lower.set_xlabel("batch size of one rank")
    for axes in (upper, lower):
        axes.legend(loc="best", fontsize="small")
    try:
        figure.savefig(target, dpi=144)
    except OSError as error:
        raise ReportFileError(
            f"{str(target)!r} cannot be written ({error}): free space there or name another"
        ) from error


def _draw(axes: Any, curve: TuningCurve, value: str, size: float, label: str) -> None:
    _points(axes, curve, value, size, "", color="#2f73b7")
    for mark in marks_of(curve):
        dash = {"solid": "-", "dash": "--", "dot": ":"}[mark.dash]
        axes.axvline(mark.batch_size, color=mark.png_color, linestyle=dash, label=f"{mark.text}: {mark.batch_size}")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.set_ylim(bottom=0)
    axes.set_ylabel(label)
    axes.grid(visible=True, alpha=0.3)


def _points(axes: Any, curve: TuningCurve, value: str, size: float, prefix: str, *, color: str) -> None:
    for is_predicted, style in ((True, {"alpha": 0.5}), (False, {"marker": "o", "ls": ""})):
        points = [p for p in curve.sorted_points(is_predicted=is_predicted) if getattr(p, value) is not None]
        label = f"{prefix}{'predicted' if is_predicted else 'measured'}"
        sizes, values = [p.batch_size for p in points], [getattr(p, value) / size for p in points]
        axes.plot(sizes, values, label=label, color=color, **style)
