"""The tuner's suite on tiny models: its records, its rows and its page, not its figures."""

from __future__ import annotations

import dataclasses
import gc
import json
import math
from typing import Any

import pytest
from rich.progress import Progress

from benchmarks.results import Measurements, Options
from benchmarks.suites import tuner
from benchmarks.tuner.jobs import quick_jobs
from benchmarks.tuner.records import Record, unsettled
from benchmarks.tuner.sleeping import SHAPES

CASE = "GPT-2 on Python's sources"


@pytest.fixture(scope="module")
def measured() -> Measurements:
    """A quick run of one job that works and one that does not."""
    works = quick_jobs()[1]
    fails = dataclasses.replace(works, title="no data", tensors=_no_data)
    gc.freeze()  # no budget counts what others hold
    with pytest.MonkeyPatch.context() as patch, Progress(disable=True) as progress:
        patch.setattr(tuner, "quick_jobs", lambda: (fails, works))
        found = tuner.run(Options(quick=True), progress)
    return found


def _no_data() -> Any:
    raise FileNotFoundError("no data here")


@pytest.fixture(scope="module")
def record(measured: Measurements) -> Record:
    """The job that worked."""
    (data,) = measured.config["jobs"]
    return Record.decoded(data)


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


def _stored(measured: Measurements) -> dict[str, Any]:
    """The measurements as they are in a result file."""
    environment = {
        "processor": "p", "num_threads": 1, "system": "s", "versions": {"torch": "2"}, "commit": "c",
    }  # fmt: skip
    rows = [dataclasses.asdict(row) for row in measured.rows]
    return json.loads(
        json.dumps({"environment": environment, "config": measured.config, "rows": rows, "notes": measured.notes})
    )
