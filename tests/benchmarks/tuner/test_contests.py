"""Contests of the finder with configured values and with the best of a grid: the order, going on, and the rows."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest
from rich.progress import Progress

from benchmarks.results import Measurements, Options
from benchmarks.suites import tuner
from benchmarks.tuner import contests as contests_module
from benchmarks.tuner.contest_jobs import quick_contests
from benchmarks.tuner.contest_rows import contest_lines, contest_rows
from benchmarks.tuner.contests import Contest, Run, best_of_grid, num_runs, runs_left
from examples.demo.training import quiet_lightning

KEY = "gpt2-small-batch"
CONFIG = {
    "key": KEY, "title": "GPT-2", "error_name": "held_out_loss", "target_loss": 1.0, "batch_size": 8, "lr": 0.1,
    "optimizer": "AdamW",
}  # fmt: skip


def ran(entrant: str, seed: int, seconds: float, **changes: Any) -> Run:
    """A training of some duration."""
    run = Run(
        contest=KEY, entrant=entrant, seed=seed, batch_size=8, lr=0.1, has_arrived=True, seconds=seconds,
        training_seconds=seconds, num_steps=1, loss=1.0, held_out_error=0.1, load_average=None,
    )  # fmt: skip
    return dataclasses.replace(run, **changes)


@pytest.fixture
def contest(monkeypatch: pytest.MonkeyPatch) -> Contest:
    """A contest of two sizes and three seeds in which nothing is trained: a larger batch takes less time."""

    def train(contest: Contest, entrant: str, seed: int, size: int, lr: float, *, seconds: float) -> Run:
        took = 80.0 / size
        return ran(entrant, seed, took, batch_size=size, lr=lr, has_arrived=took <= seconds)

    monkeypatch.setattr(contests_module, "_train", train)
    return dataclasses.replace(quick_contests()[0], seeds=(0, 1, 2), sizes=(4, 8, 32))


def test_the_entrants_take_turns_after_the_grid(contest: Contest) -> None:
    """Each seed has all three, and who goes first changes; the largest size is the first of the grid."""
    runs = list(runs_left(contest, []))
    assert [run.batch_size for run in runs[:3]] == [32, 8, 4]
    assert [run.has_arrived for run in runs[:3]] == [True, False, False]  # given up where 32 has arrived
    assert {run.seed for run in runs[:3]}.isdisjoint(contest.seeds)
    assert [(run.seed, run.entrant) for run in runs[3:]] == [
        (0, "base"), (0, "tuned"), (0, "best"), (1, "tuned"), (1, "best"), (1, "base"), (2, "best"), (2, "base"),
        (2, "tuned"),
    ]  # fmt: skip
    assert best_of_grid(contest, runs) == (32, pytest.approx(1e-3 * 8**0.5))
    assert {run.batch_size for run in runs if run.entrant == "best"} == {32}
    assert len(runs) == num_runs(contest)


def test_a_contest_goes_on_where_it_stopped(contest: Contest) -> None:
    """Stopped after any training, and stored, it ends with the same ones."""
    whole = list(runs_left(contest, []))
    assert len(whole) == num_runs(contest)
    for number in range(len(whole)):
        known = [Run(**json.loads(json.dumps(dataclasses.asdict(run)))) for run in whole[:number]]
        assert [*known, *runs_left(contest, known)] == whole


def test_without_a_grid_the_configured_values_alone_are_compared_with(contest: Contest) -> None:
    """There is no best of nothing."""
    none = dataclasses.replace(contest, sizes=(), rate_factors=())
    runs = list(runs_left(none, []))
    assert {run.entrant for run in runs} == {"base", "tuned"}
    rows = {row.metric for row in contest_rows(runs, [{"key": KEY, **none.config()}])}
    assert "tuned_over_base_time_to_loss" in rows
    assert not {name for name in rows if "best" in name}


def test_rows_have_the_goals(contest: Contest) -> None:
    """Medians over pairs of one seed; the held-out error may differ by as much as the base's own does."""
    runs = [ran("grid", 100, 5.0, batch_size=32)]
    for seed, (base, tuned, best) in enumerate([(10.0, 9.0, 5.0), (20.0, 16.0, 10.0), (10.0, 11.0, 8.0)]):
        runs += [
            ran("base", seed, base, held_out_error=0.10 + 0.01 * seed),
            ran("tuned", seed, tuned, held_out_error=0.12, batch_size=32, training_seconds=tuned - 2),
            ran("best", seed, best, batch_size=32),
        ]
    rows = {row.metric: row for row in contest_rows(runs, [CONFIG])}
    assert (rows["tuned_over_base_time_to_loss"].value, rows["tuned_over_base_time_to_loss"].goal) == (0.9, 1.05)
    assert (rows["tuned_over_best_time_to_loss"].value, rows["tuned_over_best_time_to_loss"].goal) == (1.6, 1.10)
    assert rows["tuned_over_best_time_to_loss_without_tuning"].value == 1.4
    held_out = rows["tuned_minus_base_held_out_loss"]
    assert (held_out.value, held_out.goal) == (pytest.approx(0.01), pytest.approx(0.02))
    assert (rows["num_tuned_trainings_given_up"].value, rows["tuning_seconds"].value) == (0.0, 2.0)
    assert "num_changes_of_the_best" not in rows  # base is half as fast as the best


def test_a_base_that_is_the_best_has_to_stay(contest: Contest) -> None:
    """Within 5% of the best of the grid it counts as the best; a change of it is told."""
    runs = [ran("grid", 100, 5.0)]
    for seed in range(3):
        runs += [ran("base", seed, 10.0), ran("tuned", seed, 12.0, batch_size=16 if seed == 1 else 8)]
    (row,) = [row for row in contest_rows(runs, [CONFIG]) if row.metric == "num_changes_of_the_best"]
    assert (row.value, row.goal) == (1.0, 0.0)


def test_a_training_that_never_arrives_is_no_ratio() -> None:
    """It is counted, and has no time to compare."""
    runs = [ran("base", 0, 10.0), ran("tuned", 0, 90.0, has_arrived=False, loss=None, held_out_error=None)]
    rows = {row.metric: row.value for row in contest_rows(runs, [CONFIG])}
    assert rows["num_tuned_trainings_given_up"] == 1.0
    assert "tuned_over_base_time_to_loss" not in rows
    assert "1 min 30 s, given up" in "\n".join(contest_lines(runs, [CONFIG]))


def measured(folder: Any, **options: Any) -> Measurements:
    """A quick run of the suite, contests alone."""
    with pytest.MonkeyPatch.context() as patch, Progress(disable=True) as progress:
        patch.setattr(tuner, "quick_jobs", tuple)
        patch.setattr(tuner, "_sleep", lambda *_: [])
        return tuner.run(Options(quick=True, folder=folder, **options), progress)


def test_trainings_are_stored_as_they_end(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an interrupted run has trained is there, and the next run trains the rest; other code begins anew."""
    trained: list[str] = []
    own = contests_module._train

    def train(contest: Contest, entrant: str, *args: Any, **kwargs: Any) -> Run:
        if len(trained) == 3:
            raise KeyboardInterrupt
        trained.append(entrant)
        return own(contest, entrant, *args, **kwargs)

    monkeypatch.setattr(contests_module, "_train", train)
    monkeypatch.setattr(tuner.environment, "digest_of", lambda *_: "this")
    with quiet_lightning(), pytest.raises(KeyboardInterrupt):
        measured(tmp_path)
    stored = json.loads((tmp_path / "tuner-cpu.json").read_text())
    assert [run["entrant"] for run in stored["config"]["contest_runs"]] == trained == ["grid", "grid", "base"]
    monkeypatch.setattr(contests_module, "_train", own)
    found = measured(tmp_path)
    runs = [Run(**run) for run in found.config["contest_runs"]]
    assert [dataclasses.asdict(run) for run in runs[:3]] == stored["config"]["contest_runs"]
    for contest in quick_contests():
        ours = [run for run in runs if run.contest == contest.job.key]
        assert {"grid", "base", "tuned"} <= {run.entrant for run in ours}
        assert all(math.isfinite(run.seconds) and run.num_steps > 0 for run in ours)
        (tuned,) = [run for run in ours if run.entrant == "tuned"]
        assert tuned.has_arrived
        assert "is kept" in tuned.note  # so short a run is not worth a tuning
        assert tuned.seconds > tuned.training_seconds > 0
    again = measured(tmp_path, minutes=0)
    assert again.config["contest_runs"] == found.config["contest_runs"]
    monkeypatch.setattr(tuner.environment, "digest_of", lambda *_: "other")
    assert measured(tmp_path, minutes=0).config["contest_runs"] == []
