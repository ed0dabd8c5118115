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
from benchmarks.tuner.contest_jobs import contests, quick_contests
from benchmarks.tuner.contest_rows import ALL_CONTESTS, contest_lines, contest_rows
from benchmarks.tuner.contests import Contest, Run, best_of_grid, num_runs, runs_left
from examples.demo.training import quiet_lightning
from tests.quick_collections import quick_collections as quick_collections

KEY = "digits-sgd"
CONFIG = {
    "key": KEY, "title": "digits", "error_name": "held_out_wrong_share", "target_loss": 1.0, "batch_size": 8, "lr": 0.1,
    "optimizer": "SGD",
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
    """Each seed has all three, and who goes first changes; the configured size is the first of the grid."""
    runs = list(runs_left(contest, []))
    assert [run.batch_size for run in runs[:3]] == [8, 4, 32]
    assert [run.has_arrived for run in runs[:3]] == [True, False, True]  # 4 is given up where 8 has arrived
    assert {run.seed for run in runs[:3]}.isdisjoint(contest.seeds)
    assert [(run.seed, run.entrant) for run in runs[3:]] == [
        (0, "base"), (0, "tuned"), (0, "best"), (1, "tuned"), (1, "best"), (1, "base"), (2, "best"), (2, "base"),
        (2, "tuned"),
    ]  # fmt: skip
    assert best_of_grid(contest, runs) == (32, pytest.approx(0.04))
    assert {run.batch_size for run in runs if run.entrant == "best"} == {32}
    assert len(runs) == num_runs(contest)


def test_a_contest_goes_on_where_it_stopped(contest: Contest) -> None:
    """Stopped after any training, and stored, it ends with the same ones; so does one that is repeated."""
    contest = dataclasses.replace(contest, num_repeats=2)
    whole = list(runs_left(contest, []))
    assert len(whole) == num_runs(contest)
    for number in range(len(whole)):
        known = [Run(**json.loads(json.dumps(run.encoded()))) for run in whole[:number]]
        assert [*known, *runs_left(contest, known)] == whole


def test_a_contest_is_repeated_seed_by_seed(contest: Contest) -> None:
    """After all seeds once; who goes first turns on, and what is compared ran side by side."""
    runs = [run for run in runs_left(dataclasses.replace(contest, num_repeats=2), []) if run.entrant != "grid"]
    assert [run.repeat for run in runs] == [0] * 9 + [1] * 9
    assert [(run.seed, run.entrant) for run in runs[9:12]] == [(0, "base"), (0, "tuned"), (0, "best")]
    slowed = [dataclasses.replace(run, seconds=run.seconds * (10 if run.repeat else 1)) for run in runs]
    rows = {row.metric: row.value for row in contest_rows(slowed, [{"key": KEY, **contest.config()}])}
    assert rows["tuned_over_base_time_to_loss"] == 1.0


def test_the_best_is_not_timed_twice_where_it_is_the_base(contest: Contest) -> None:
    """Of a grid that the configured values win there is no third training."""
    one = dataclasses.replace(contest, sizes=(4, 8))
    assert {run.entrant for run in runs_left(one, [])} == {"grid", "base", "tuned"}


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
    held_out = rows["tuned_minus_base_held_out_wrong_share"]
    assert (held_out.value, held_out.goal) == (pytest.approx(0.01), pytest.approx(0.02))
    assert (rows["num_tuned_trainings_given_up"].value, rows["tuning_seconds"].value) == (0.0, 2.0)
    assert "num_changes_of_the_best" not in rows  # base is half as fast as the best
    assert not any(row.case == ALL_CONTESTS for row in contest_rows(runs, [CONFIG]))  # of one job


def test_a_base_that_is_the_best_has_to_stay(contest: Contest) -> None:
    """Within 5% of the best of the grid it counts as the best; a change of it is told."""
    runs = [ran("grid", 100, 5.0)]
    for seed in range(3):
        runs += [ran("base", seed, 10.0), ran("tuned", seed, 12.0, batch_size=16 if seed == 1 else 8)]
    (row,) = [row for row in contest_rows(runs, [CONFIG]) if row.metric == "num_changes_of_the_best"]
    assert (row.value, row.goal) == (1.0, 0.0)


def test_two_jobs_have_to_be_clearly_faster() -> None:
    """The second least ratio of all jobs is held against 0.9, once all were run."""
    runs, configs = [], []
    for number, tuned in enumerate((8.0, 10.2, 8.5)):
        configs.append({**CONFIG, "key": str(number), "title": str(number)})
        runs += [ran("base", 0, 10.0, contest=str(number)), ran("tuned", 0, tuned, contest=str(number))]
    (row, most) = [row for row in contest_rows(runs, configs) if row.case == ALL_CONTESTS]
    assert (row.value, row.goal, most.value) == (0.85, 0.9, 1.02)
    assert not [row for row in contest_rows(runs[:-1], configs) if row.case == ALL_CONTESTS]


def test_a_training_that_never_arrives_is_no_ratio() -> None:
    """It is counted, and has no time to compare."""
    runs = [ran("base", 0, 10.0), ran("tuned", 0, 90.0, has_arrived=False, loss=None, held_out_error=None)]
    rows = {row.metric: row.value for row in contest_rows(runs, [CONFIG])}
    assert rows["num_tuned_trainings_given_up"] == 1.0
    assert "tuned_over_base_time_to_loss" not in rows
    assert "1 min 30 s, given up" in "\n".join(contest_lines(runs, [CONFIG]))


def test_the_contests_that_count() -> None:
    """Four jobs, seven sizes with the configured one, five seeds; held-out samples are in no training."""
    found = contests()
    assert [contest.job.key for contest in found] == ["digits-sgd", "digits-adamw", "resnet50-narrow", "gpt2-small"]
    for contest in found:
        assert len(contest.sizes) == 7
        assert contest.job.batch_size in contest.sizes
        assert contest.seeds == (0, 1, 2, 3, 4)
        assert json.dumps(contest.config())
        train, held_out = contest.job.tensors(), contest.held_out()
        assert len(held_out[0]) == pytest.approx(len(train[0]) / 4, abs=1)
        assert train[0][:4].shape == held_out[0][:4].shape
        assert not train[0][0].equal(held_out[0][0])


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
    assert [run.encoded() for run in runs[:3]] == stored["config"]["contest_runs"]
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


def test_notes_that_differ_in_figures_alone_are_shown_once(contest: Contest) -> None:
    """The first of them, and how many trainings had it."""
    notes = ["Kept: 3.5 s of 40 s.", "Kept: 120 ms of 41.25 s.", "Raised by 8.", "Kept: 2 s of 9 s."]
    runs = [ran("tuned", seed, 10.0, note=note) for seed, note in enumerate(notes)]
    lines = list(contest_lines(runs, [{"key": KEY, **contest.config()}]))
    assert [line for line in lines if line.startswith("- ")] == [
        "- The finder, in 3 of 4: Kept: 3.5 s of 40 s.", "- The finder, in 1 of 4: Raised by 8.",
    ]  # fmt: skip
