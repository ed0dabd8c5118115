"""Throughput and peak over batch sizes, measured in one fit."""

from __future__ import annotations

import pytest

from benchmarks.tuner import grid
from benchmarks.tuner.finding import budget_of
from benchmarks.tuner.grid import Measured, grid_sizes, measure
from benchmarks.tuner.jobs import Job, quick_jobs
from examples.demo.training import quiet_lightning


@pytest.fixture(scope="module")
def job() -> Job:
    """A tiny language model."""
    return quick_jobs()[1]


def test_the_grid_is_round_and_has_what_matters() -> None:
    """Powers of two and those times 1.5, the ends, and the sizes that are asked for."""
    assert grid_sizes(2, 30, [7, 99]) == [2, 3, 4, 6, 7, 8, 12, 16, 24, 30]


def test_rounds_are_interleaved() -> None:
    """The largest is learned first; each round has every size once, in a turning order."""
    schedule = grid._schedule([2, 4], num_rounds=2, num_steps=1)
    learned = [(4, "learn")] * 6 + [(4, "track")] + [(2, "learn")] * 6 + [(2, "track")]
    rounds = [(2, "warm"), (2, "time"), (4, "warm"), (4, "time")]
    turned = [(2, "warm"), (2, "time"), (4, "warm"), (4, "time")]  # begins with 4, backwards
    assert schedule == [(2, "learn"), *learned, *rounds, *turned]


def test_throughput_is_that_of_the_median_round() -> None:
    """Rounds count alike, however many steps are in each."""
    found = Measured(
        batch_size=6, step_seconds=((1.0, 3.0), (3.0, 3.0), (9.0, 9.0)), peak_bytes=1, recomputed_bytes=0,
        swapped_bytes=0, is_planned=True,
    )  # fmt: skip
    assert found.round_seconds == [2.0, 3.0, 9.0]
    assert found.samples_per_second == 2.0


def test_every_size_is_measured_under_its_final_plan(job: Job) -> None:
    """Peaks rise with size until the plan holds them at the budget; a size that has no plan is told apart."""
    with quiet_lightning():
        budget_bytes = budget_of(job)
        measured, infeasible = measure(job, budget_bytes, [8, 16, 24, 64], num_rounds=2, num_steps=1)
    assert infeasible == [64]
    assert [found.batch_size for found in measured] == [8, 16, 24]
    small, plain, planned = measured
    assert small.peak_bytes < plain.peak_bytes <= budget_bytes
    assert 0.9 * budget_bytes < planned.peak_bytes <= budget_bytes
    assert small.recomputed_bytes == small.swapped_bytes == 0
    assert planned.recomputed_bytes + planned.swapped_bytes > 0
    for found in measured:
        assert found.is_planned
        assert [len(steps) for steps in found.step_seconds] == [1, 1]
        assert found.samples_per_second > 0
