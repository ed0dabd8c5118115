"""The result file of many cases: whole after each case, and enough to go on from."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.gpu.store import CaseResult, Store, failed
from benchmarks.results import Measurements, Row

ENVIRONMENT = {"commit": "abc"}


def store(path: Path) -> Store:
    return Store(path=path, suite="gpu", device="a gpu", environment=ENVIRONMENT, order=["first", "second", "third"])


def done(title: str, value: float, *, commit: str = "abc") -> CaseResult:
    measured = Measurements(
        rows=[Row(case=title, metric="ratio", value=value, goal=1.1), Row(case=title, metric="ratio_low", value=1.0)],
        config={"batch_size": 8},
        repeats=5,
        spread={title: {"step_seconds": [1.0, 2.0, 3.0]}},
        notes={title: "slow"} if value > 2 else {},
    )
    return CaseResult(state="done", seconds=12.0, commit=commit, measured=measured)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "results" / "gpu-a-gpu.json"


def test_everything_survives_the_file(path: Path):
    """What is read back is what was put, each case with its own rows."""
    written = store(path)
    written.put("second", done("b", 1.2, commit="older"))
    written.put("first", done("a", 2.5))
    written.put("third", failed("c", "out of memory", seconds=3.0, commit="abc"))
    written.put_trial("fourth", 64, {"fits": True})
    read = store(path)
    read.load()
    assert read.results == written.results
    assert read.trials == {"fourth": {"64": {"fits": True}}}


def test_rows_stand_in_the_order_of_the_cases(path: Path):
    """Whichever case was measured first; cases that exist no more come last."""
    kept = store(path)
    for key, title in (("gone", "z"), ("third", "c"), ("first", "a")):
        kept.put(key, done(title, 1.0))
    assert [row.case for row in kept.measured.rows if row.metric == "ratio"] == ["a", "c", "z"]


def test_a_new_result_takes_the_place_of_the_old(path: Path):
    """A case that is measured again leaves no row of its error, and a search that ended none of its trials."""
    kept = store(path)
    kept.put("first", failed("a", "out of memory", seconds=1.0, commit="abc"))
    kept.put_trial("first", 8, {"fits": True})
    kept.put("first", done("a, in detail", 1.2))
    assert [row.case for row in kept.measured.rows] == ["a, in detail"] * 2
    assert kept.trials == {}
    kept.forget(["first", "second"])
    assert kept.measured.rows == []
