"""WriteBarrier the plots of a result: an HTML page, and a PNG where matplotlib is installed."""

from __future__ import annotations

import os
from pathlib import Path

from lightning_offload.callbacks.tuning.result import TuningResult
from lightning_offload.callbacks.tuning.table import summary
from lightning_offload.errors import OffloadError
from lightning_offload.lightning_packages import rank_zero
from lightning_offload.report.tuning_picture import save_tuning_png
from lightning_offload.report.tuning_plot import Simulated, TuningCurve, TuningPoint, save_tuning_html
from lightning_offload.tuning.scaling import COLUMNS, Scaling

__all__ = ["curve_of", "save_plots"]

NAME = "batch_size"


def curve_of(result: TuningResult) -> TuningCurve:
    """The points and marks of a result."""
    measured = [
        TuningPoint(
            batch_size=trial.batch_size,
            is_predicted=False,
            samples_per_second=trial.samples_per_second,
            peak_bytes=trial.peak_bytes,
            is_feasible=trial.is_ok,
        )
        for trial in result.trials
    ]
    predicted = [
        TuningPoint(
            batch_size=prediction.batch_size,
            is_predicted=True,
            samples_per_second=prediction.samples_per_second,
            peak_bytes=prediction.peak_bytes,
            is_feasible=prediction.is_feasible,
        )
        for prediction in result.predictions
    ]
    return TuningCurve(
        points=(*measured, *predicted),
        chosen=result.batch_size,
        largest=result.largest_size,
        largest_plain=result.largest_plain_size,
        budget_bytes=result.budget_bytes,
        lead=f"Chosen: {summary(result)}",
        simulated=None if result.scaling is None else _simulated(result.scaling),
    )


def _simulated(scaling: Scaling) -> Simulated:
    return Simulated(caption=scaling.caption, columns=COLUMNS, rows=scaling.rows)


def save_plots(result: TuningResult, folder: str | os.PathLike[str], package: str) -> None:
    """Write both plots; one that cannot be written is a warning, since the training is what was asked for."""
    target = Path(folder)
    curve = curve_of(result)
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        rank_zero(package, "warn", f"no plot of the trials: the folder {str(target)!r} cannot be made ({error})")
        return
    for save, suffix in ((save_tuning_html, "html"), (save_tuning_png, "png")):
        try:
            save(target / f"{NAME}.{suffix}", curve)
        except OffloadError as error:
            rank_zero(package, "warn", f"no {suffix.upper()} plot of the trials: {error}")
