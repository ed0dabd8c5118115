"""The tuner's suite on tiny models: its records, its rows and its page, not its figures."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from rich.progress import Progress

from benchmarks.results import Measurements, Options
from benchmarks.suites import tuner
from benchmarks.tuner import pictures
from benchmarks.tuner.jobs import quick_jobs
from benchmarks.tuner.records import Record, job_rows, unsettled
from benchmarks.tuner.sleeping import SHAPES
from lightning_offload.errors import UnsupportedError
from tests.quick_collections import quick_collections as quick_collections  # no budget counts what others hold

CASE = "GPT-2 on Python's sources"


@pytest.fixture(scope="module")
def measured() -> Measurements:
    """A quick run of one job that works and one that does not."""
    works = quick_jobs()[1]
    fails = dataclasses.replace(works, title="no data", tensors=_no_data)
    with pytest.MonkeyPatch.context() as patch, Progress(disable=True) as progress:
        patch.setattr(tuner, "quick_jobs", lambda: (fails, works))
        return tuner.run(Options(quick=True), progress)


def _no_data() -> Any:
    raise FileNotFoundError("no data here")


@pytest.fixture(scope="module")
def record(measured: Measurements) -> Record:
    """The job that worked."""
    (data,) = measured.config["jobs"]
    return Record.decoded(data)


def test_a_record_survives_json(measured: Measurements, record: Record) -> None:
    """Written to JSON and read again it is the same."""
    assert Record.decoded(json.loads(json.dumps(measured.config["jobs"][0]))) == record
    assert record.encoded() == measured.config["jobs"][0]


def test_rows_have_the_goals_of_a_right_choice(measured: Measurements, record: Record) -> None:
    """Both halves of "right" with intervals, the trials, and time to the loss; all figures are finite."""
    rows = {row.metric: row for row in measured.rows if row.case == CASE}
    assert all(math.isfinite(row.value) for row in rows.values())
    assert rows["best_over_chosen_throughput"].goal == pytest.approx(1 / 0.95)
    assert rows["smaller_over_best_throughput"].goal == pytest.approx(0.985)
    assert {f"smaller_over_best_throughput_{end}" for end in ("low", "high")} <= rows.keys()
    assert rows["num_wrong_choices"].value == float(not record.verdict.is_right)
    assert rows["num_trials"].value == len(record.result.trials) <= 12
    assert rows["tuned_over_base_time_to_loss"].goal == 1.0
    assert rows["num_races_won"].value + rows["num_races_lost"].value == 1
    assert rows["budget_bytes"].value == record.result.budget_bytes
    assert len(rows) == sum(row.case == CASE for row in measured.rows)


SHUFFLED_LOADER_BYTES = 180_000
"""The order of the samples, and little else: it lies beside the finder's steps, not beside those of the grid."""


def test_the_plan_matters_and_its_peaks_are_foreseen(record: Record) -> None:
    """Plain training ends at the size that the budget was made for, the plan goes further; peaks are foreseen."""
    # the budget is the peak at that size to the byte, and what else the tuning process holds counts
    assert record.result.largest_plain_size in (record.config["plain_size"], record.config["plain_size"] - 1)
    assert record.result.largest_size > record.config["plain_size"]
    sizes = [found.batch_size for found in record.measured]
    assert record.result.batch_size in sizes
    assert max(sizes) > record.config["plain_size"]
    predicted = record.predicted()
    both = [found for found in record.measured if found.batch_size in predicted]
    assert len(both) >= 3
    for found in both:
        more = predicted[found.batch_size][1] - found.peak_bytes
        assert more >= -0.05 * found.peak_bytes
        if found.is_planned:  # by another plan, which may leave more of the budget free
            assert record.result.budget_bytes is not None
            assert predicted[found.batch_size][1] <= record.result.budget_bytes
        else:
            assert more <= 0.05 * found.peak_bytes + SHUFFLED_LOADER_BYTES


def test_a_job_that_fails_is_an_error_row_and_a_note(measured: Measurements) -> None:
    """The others go on; the reason stands in the notes."""
    assert [row.case for row in measured.rows if row.metric == "error"] == ["no data"]
    assert measured.notes["no data"] == "FileNotFoundError: no data here"


@pytest.mark.parametrize(("scatter", "is_settled"), [(0.0, True), (0.1, False)])
def test_a_verdict_within_its_interval_is_not_settled(record: Record, scatter: float, is_settled: bool) -> None:
    """Where the rounds put the ratio on both sides of the limit the page says so, and nowhere else."""
    chosen, fastest = 10, 20
    rounds = [0.1 * (1 + scatter * sign) for sign in (-1, 1, -0.5, 0.5, -1, 1)]
    steps = {chosen: [0.1] * 6, fastest: [2 * seconds / 1.05 for seconds in rounds]}
    measured = tuple(
        dataclasses.replace(record.measured[0], batch_size=size, step_seconds=tuple((each,) for each in seconds))
        for size, seconds in steps.items()
    )
    found = dataclasses.replace(record, measured=measured, result=dataclasses.replace(record.result, batch_size=chosen))
    assert (unsettled(found) == []) == is_settled
    config = {"jobs": [found.encoded()], "sleeping": [], "load_average": None}
    text = tuner.page(_stored(Measurements(rows=[], config=config, repeats=6)))
    assert ("do not settle" not in text) == is_settled


def test_every_shape_was_searched(measured: Measurements) -> None:
    """One search each, and a goal for all of them together."""
    assert [outcome["shape"] for outcome in measured.config["sleeping"]] == list(SHAPES)
    (row,) = [row for row in measured.rows if row.metric == "wrong_share" and row.goal is not None]
    assert (row.case, row.goal) == ("sleeping modules, all shapes", 0.05)


def test_the_page_says_what_was_found(measured: Measurements, record: Record) -> None:
    """The choice and the verdict, each grid size, each trial and each race, and what could not be measured."""
    text = tuner.page(_stored(measured))
    assert f"Found: **{record.result.batch_size}**" in text
    assert f"is **{'right' if record.verdict.is_right else 'wrong'}**" in text
    assert text.count(" to ") >= len(record.measured)
    for number, trial in enumerate(record.result.trials, 1):
        assert f"\n| {number} | {trial.batch_size} |" in text
    assert f"\n| 0 | {record.config['batch_size']} | 0.001 |" in text
    assert "- no data: FileNotFoundError: no data here" in text
    assert "images/tuner-gpt2.png" in text
    without = _stored(measured)
    without["notes"] = {**without["notes"], "pictures": "UnsupportedError: none"}
    assert "images/tuner-gpt2.png" not in tuner.page(without)


def _stored(measured: Measurements) -> dict[str, Any]:
    """The measurements as they are in a result file."""
    environment = {
        "processor": "p", "num_threads": 1, "system": "s", "versions": {"torch": "2"}, "commit": "c",
    }  # fmt: skip
    rows = [dataclasses.asdict(row) for row in measured.rows]
    return json.loads(
        json.dumps({"environment": environment, "config": measured.config, "rows": rows, "notes": measured.notes})
    )


def test_the_picture_shows_the_grid_as_measured(record: Record) -> None:
    """Measured points are the grid's and not the trials'; predictions that do not fit are left out."""
    shown = pictures.curve(record)
    measured = {point.batch_size: point.peak_bytes for point in shown.points if not point.is_predicted}
    assert measured == {found.batch_size: found.peak_bytes for found in record.measured}
    assert all(point.is_feasible for point in shown.points)
    predicted = {point.batch_size for point in shown.points if point.is_predicted}
    assert predicted == {size for size in record.predicted() if size >= min(measured)}
    assert (shown.chosen, shown.largest_plain) == (record.result.batch_size, record.result.largest_plain_size)


def test_without_a_way_to_draw_the_error_names_two(
    record: Record, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """matplotlib, or a browser."""

    def fail(*_: object) -> None:
        raise UnsupportedError("a PNG needs matplotlib: pip install matplotlib")

    monkeypatch.setattr(pictures, "save_tuning_png", fail)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(UnsupportedError, match="pip install matplotlib; or install Chromium or Chrome"):
        pictures.draw([record], tmp_path)


@pytest.mark.skipif(not any(map(shutil.which, pictures._BROWSERS)), reason="needs Chromium or Chrome")
def test_a_browser_draws_where_matplotlib_does_not(
    record: Record, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The picture is a PNG of the window's size, named after the job."""
    pytest.importorskip("plotly", reason="plotly, the extra 'report', is not installed")

    def fail(*_: object) -> None:
        raise UnsupportedError("no matplotlib")

    monkeypatch.setattr(pictures, "save_tuning_png", fail)
    (path,) = pictures.draw([record], tmp_path / "images")
    content = path.read_bytes()
    assert path.name == "tuner-gpt2.png"
    assert content.startswith(b"\x89PNG")
    assert int.from_bytes(content[16:20], "big") == int(pictures._WINDOW.split(",")[0])


def test_rows_do_without_what_was_not_reached(record: Record) -> None:
    """A race that nobody finished leaves no ratio, and is counted."""
    races = tuple(dataclasses.replace(race, has_arrived=False) for race in record.races)
    rows = {row.metric: row.value for row in job_rows(dataclasses.replace(record, races=races))}
    assert "tuned_over_base_time_to_loss" not in rows
    assert "tuned_time_to_loss_seconds" not in rows
    assert rows["num_trainings_given_up"] == 2


def test_another_device_is_refused() -> None:
    """The suite is about this CPU."""
    with Progress(disable=True) as progress, pytest.raises(ValueError, match="give --device cpu"):
        tuner.run(Options(device="cuda"), progress)
