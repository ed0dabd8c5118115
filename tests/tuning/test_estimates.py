"""Repeats of all trials of a size count together, and one slow step counts little."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lightning_offload.tuning.posterior import pool, repeat_deviation, trial_error
from lightning_offload.tuning.trial import Trial


def noisy(size: int, count: int, seed: int, deviation: float = 0.05) -> Trial:
    steps = np.exp(np.random.default_rng(seed).normal(0, deviation, count))
    return Trial.from_steps(size, tuple(float(step) for step in steps))


def test_trials_of_a_size_are_pooled() -> None:
    """Repeats add up over trials and the error falls; failed trials are left out; sizes ascend."""
    failed = Trial(batch_size=16, is_ok=False, reason="out of memory")
    once = pool([noisy(8, 4, 0), noisy(4, 4, 1)])
    twice = pool([noisy(8, 4, 0), failed, noisy(4, 4, 1), noisy(8, 4, 2)])
    assert list(twice) == [4, 8]
    assert (once[8].num_repeats, twice[8].num_repeats) == (4, 8)
    assert twice[8].relative_error < 0.8 * once[8].relative_error


def test_one_slow_step_counts_little() -> None:
    """A step that takes ten times as long moves the throughput by less than the others scatter."""
    steps = (1.00, 1.01, 0.99, 1.02, 0.98)
    plain = pool([Trial.from_steps(8, steps)])[8].samples_per_second
    slow = pool([Trial.from_steps(8, (*steps[:4], 9.8))])[8].samples_per_second
    assert abs(slow / plain - 1) < 0.02


def test_throughput_of_all_ranks_is_kept() -> None:
    """Where a trial's throughput is that of several ranks, so is the estimate."""
    one = Trial.from_steps(8, (1.0, 2.0, 3.0))
    four = Trial(batch_size=8, is_ok=True, samples_per_second=16.0, step_seconds=(1.0, 2.0, 3.0))
    assert pool([four])[8].samples_per_second == pytest.approx(4 * pool([one])[8].samples_per_second)


def test_a_trial_without_repeats_counts_as_one() -> None:
    """A throughput alone is taken as it is."""
    estimate = pool([Trial(batch_size=8, is_ok=True, samples_per_second=16.0)])[8]
    assert (estimate.samples_per_second, estimate.num_repeats) == (pytest.approx(16.0), 1)


def test_the_deviation_is_found_from_few_repeats() -> None:
    """Ten trials of four repeats give the scatter of a repeat to within a fifth, drift between trials left out."""
    trials = [noisy(size, 4, size, 0.05) for size in range(10, 20)]
    assert repeat_deviation(trials) == pytest.approx(0.05, rel=0.2)
    drifted = [Trial.from_steps(t.batch_size, tuple(s * t.batch_size for s in t.step_seconds)) for t in trials]
    assert repeat_deviation(drifted) == pytest.approx(repeat_deviation(trials))


def test_the_error_of_a_trial_falls_with_its_repeats_to_a_floor() -> None:
    """Four times the repeats halve the error, but a machine's drift remains."""
    assert trial_error(4, 0.05) / trial_error(16, 0.05) == pytest.approx(2, rel=0.05)
    assert trial_error(10**9, 0.05) == pytest.approx(0.005, rel=0.01)
    assert math.isclose(trial_error(0, 0.05), trial_error(1, 0.05))
