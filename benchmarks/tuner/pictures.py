"""The plots of docs/tuner.md, one picture per job.

`python -m benchmarks.tuner.pictures` draws those of the stored result again. They are the finder's own plots with the
measured grid in place of its trials; they need matplotlib.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.results import draw_stored
from benchmarks.tuner.records import Record
from lightning_offload.callbacks.tuning.result import curve_of
from lightning_offload.report.tuning_plot import TuningCurve, TuningPoint, save_tuning_png

__all__ = ["PICTURES_FOLDER", "curve", "draw", "picture_name"]

PICTURES_FOLDER = Path(__file__).resolve().parents[2] / "docs" / "images"


def picture_name(key: str) -> str:
    """Return the file name of a job's picture."""
    return f"tuner-{key}.png"


def curve(record: Record) -> TuningCurve:
    """Return what a picture shows: the grid as measured points, the finder's predictions, its choice and its edges."""
    measured = tuple(
        TuningPoint(
            batch_size=found.batch_size,
            is_predicted=False,
            samples_per_second=found.samples_per_second,
            peak_bytes=found.peak_bytes,
            is_feasible=True,
        )
        for found in record.measured
    )
    found = curve_of(record.result)
    # sizes that were not measured, or do not fit, have no place on an axis whose ends they would move
    smallest = min(point.batch_size for point in measured)
    predicted = tuple(p for p in found.points if p.is_predicted and p.is_feasible and p.batch_size >= smallest)
    return dataclasses.replace(found, points=(*measured, *predicted), lead=f"{record.title}. {found.lead}")


def draw(records: Sequence[Record], folder: Path = PICTURES_FOLDER) -> list[Path]:
    """Draw one picture per job.

    Raises:
        UnsupportedError: matplotlib is not installed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / picture_name(record.key) for record in records]
    for record, path in zip(records, paths, strict=True):
        save_tuning_png(path, curve(record))
    return paths


def records_of(config: dict[str, Any]) -> list[Record]:
    """Return the jobs of a stored result's configuration."""
    return [Record.decoded(data) for data in config["jobs"]]


if __name__ == "__main__":
    sys.exit(draw_stored("tuner", lambda config: draw(records_of(config))))
