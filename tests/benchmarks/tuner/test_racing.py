"""Races to a training loss."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks.tuner.jobs import quick_jobs
from benchmarks.tuner.racing import Race, RunningMean, median_ratio, race, ratios
from examples.demo.training import quiet_lightning


def ran(seed: int, seconds: float, *, is_tuned: bool, has_arrived: bool = True) -> Race:
    """A race of some duration."""
    return Race(
        is_tuned=is_tuned, seed=seed, batch_size=4, lr=0.1, has_arrived=has_arrived, seconds=seconds, num_steps=1,
        loss=1.0,
    )  # fmt: skip


def test_the_mean_is_over_the_same_samples_for_every_batch_size() -> None:
    """It is there when the window is full; a batch larger than the window is a window."""
    small, large = RunningMean(8, 4), RunningMean(8, 16)
    assert [small.add(loss) for loss in (4.0, 2.0, 1.0)] == [None, 3.0, 1.5]
    assert [large.add(loss) for loss in (4.0, 2.0)] == [4.0, 2.0]


def test_ratios_are_of_pairs_that_both_arrived() -> None:
    """Tuned over base by seed; a training that was given up has no time to compare."""
    races = [
        ran(0, 10.0, is_tuned=False), ran(0, 5.0, is_tuned=True),
        ran(1, 12.0, is_tuned=True), ran(1, 10.0, is_tuned=False),
        ran(2, 10.0, is_tuned=False, has_arrived=False), ran(2, 1.0, is_tuned=True),
    ]  # fmt: skip
    assert ratios(races) == [0.5, 1.2]
    assert median_ratio(races) == pytest.approx(0.85)
    assert median_ratio(races[-2:]) is None


def test_both_trainings_run_for_every_seed_and_end_at_the_loss() -> None:
    """The order changes from seed to seed; a loss that is there at once takes a window, one never there all samples."""
    job = dataclasses.replace(quick_jobs()[1], target_loss=100.0, window=8, num_race_samples=32)
    advanced: list[int] = []
    with quiet_lightning():
        races = race(job, 1 << 30, tuned=(8, 0.002), seeds=(0, 1), advance=lambda: advanced.append(1))
        hopeless = race(
            dataclasses.replace(job, target_loss=0.0), 1 << 30, tuned=(8, 0.002), seeds=(0,), advance=lambda: None
        )
    assert [(one.seed, one.is_tuned) for one in races] == [(0, False), (0, True), (1, True), (1, False)]
    assert [(one.batch_size, one.num_steps) for one in races[:2]] == [(4, 2), (8, 1)]
    assert all(one.has_arrived and one.seconds > 0 for one in races)
    assert len(advanced) == 4
    assert [(one.has_arrived, one.num_steps) for one in hopeless] == [(False, 8), (False, 4)]
    assert all(5 < one.loss < 6 for one in hopeless)
