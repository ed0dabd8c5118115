"""The plots of docs/tuner.md, one picture per job.

`python -m benchmarks.tuner.pictures` draws those of the stored result again. They are the finder's own plots with the
measured grid in place of its trials. matplotlib draws them if it is installed; else a headless Chromium or Chrome takes
a picture of the HTML page.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.results import result_path
from benchmarks.tuner.records import Record
from lightning_offload.callbacks.tuning.result import curve_of
from lightning_offload.errors import UnsupportedError
from lightning_offload.report.tuning_plot import TuningCurve, TuningPoint, save_tuning_html, save_tuning_png

__all__ = ["PICTURES_FOLDER", "curve", "draw", "main", "picture_name"]

PICTURES_FOLDER = Path(__file__).resolve().parents[2] / "docs" / "images"

_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
_WINDOW = "1000,1040"  # both plots, without the table below them
_TIMEOUT_SECONDS = 120


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
        UnsupportedError: There is neither matplotlib nor a browser.
    """
    folder.mkdir(parents=True, exist_ok=True)
    return [_draw(curve(record), folder / picture_name(record.key)) for record in records]


def _draw(shown: TuningCurve, path: Path) -> Path:
    browser = next(filter(None, map(shutil.which, _BROWSERS)), None)
    try:
        save_tuning_png(path, shown)
    except UnsupportedError as error:
        if browser is None:
            raise UnsupportedError(f"{error}; or install Chromium or Chrome") from None
        _photograph(browser, shown, path)
    return path


def _photograph(browser: str, shown: TuningCurve, path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="tuner-picture-") as folder:
        page = Path(folder, "page.html")
        save_tuning_html(page, shown)
        command = [
            browser, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars",
            f"--user-data-dir={folder}/profile", "--virtual-time-budget=20000", f"--window-size={_WINDOW}",
            f"--screenshot={path}", page.as_uri(),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=False)
        if done.returncode or not path.exists():
            raise UnsupportedError(f"{browser} took no picture of the page: {done.stderr[-500:]}")


def records_of(config: dict[str, Any]) -> list[Record]:
    """Return the jobs of a stored result's configuration."""
    return [Record.decoded(data) for data in config["jobs"]]


def main() -> int:
    """Draw the pictures of the stored result; returns the exit status."""
    path = result_path("tuner", "cpu")
    if not path.exists():
        print(f"error: there is no {path}: run `python -m benchmarks tuner` first", file=sys.stderr)
        return 2
    for drawn in draw(records_of(json.loads(path.read_text(encoding="utf-8"))["config"])):
        print(f"wrote {drawn}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
