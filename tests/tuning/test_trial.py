"""Trials say what was measured, and refuse what cannot have been."""

from __future__ import annotations

import math

import pytest

from lightning_offload.errors import TuningError
from lightning_offload.tuning.trial import Trial


def test_throughput_is_by_the_median_step() -> None:
    """One slow step does not change the throughput."""
    trial = Trial.from_steps(8, (0.5, 0.5, 4.0), peak_bytes=7)
    assert (trial.is_ok, trial.samples_per_second, trial.peak_bytes) == (True, 16.0, 7)


@pytest.mark.parametrize("steps", [(), (0.0, 0.0, 1.0)])
def test_a_trial_needs_timed_steps(steps: tuple[float, ...]) -> None:
    """No repeats, or steps that took no time, give one clear error that echoes them."""
    with pytest.raises(TuningError, match="at least one repeat") as caught:
        Trial.from_steps(8, steps)
    assert str(steps) in str(caught.value)


def test_an_ok_trial_has_a_throughput(subtests: pytest.Subtests) -> None:
    """A trial that is ok without a usable throughput is refused."""
    for speed in [None, 0.0, -1.0, math.inf, math.nan]:
        with subtests.test(speed=speed), pytest.raises(TuningError, match="is ok but gives"):
            Trial(batch_size=8, is_ok=True, samples_per_second=speed)


def test_size_zero() -> None:
    """A trial has at least one sample."""
    with pytest.raises(TuningError, match="batch size 0 is not possible"):
        Trial(batch_size=0, is_ok=False)
