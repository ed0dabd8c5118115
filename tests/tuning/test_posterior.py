"""Curve and edge by the trials: repeats count together, one slow step little, and draws say no more than these."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lightning_offload.tuning.posterior import (
    NUM_DRAWS,
    Array,
    Estimate,
    draw_curves,
    draw_edges,
    pool,
    possible_shapes,
    repeat_deviation,
    trial_error,
)
from lightning_offload.tuning.trial import Trial
from tests.tuning.curves import Curve, peaked, saturating, stepped

SIZES = np.array([2.0**power for power in range(1, 11)])


def curves(
    sizes: Array, log_speed: Array, index: list[int], error: float = 0.01, num_trials: int = 1
) -> tuple[Array, float]:
    estimates = [
        Estimate(
            batch_size=int(sizes[at]), samples_per_second=math.exp(speed), relative_error=error, num_trials=num_trials
        )
        for at, speed in zip(index, log_speed, strict=True)
    ]
    return draw_curves(sizes, *possible_shapes(sizes, int(sizes[index].max())), estimates)


def draws(curve: Curve, measured: list[int], error: float = 0.01) -> Array:
    index = [int(np.flatnonzero(size == SIZES)[0]) for size in measured]
    return curves(SIZES, np.log([curve(size) for size in measured]), index, error)[0]


@pytest.mark.parametrize("curve", [saturating(30), peaked(30, 100, 1.0), stepped(30, 16)])
def test_draws_pass_through_what_was_measured(curve: Curve) -> None:
    """At measured sizes the draws lie about the truth, as close as the trials' error."""
    measured = [4, 16, 64, 256, 1024]
    found = draws(curve, measured)
    for size in measured:
        column = found[:, np.flatnonzero(size == SIZES)[0]]
        assert abs(column.mean() - np.log(curve(size))) < 0.012
        assert column.std() < 0.012


def test_draws_are_wide_where_nothing_was_measured() -> None:
    """Far from all trials the draws differ much more than at them; between two trials they differ little more."""
    spread = draws(saturating(30), [4, 16]).std(axis=0)
    at, beyond = spread[np.flatnonzero(SIZES == 16)[0]], spread[-1]
    assert beyond > 10 * at


def test_trials_of_a_plain_curve_help_one_another() -> None:
    """Eight trials of a curve that has one of the shapes tell each size better than its own trial."""
    found = draws(saturating(30), [int(size) for size in SIZES[:8]], error=0.03)
    assert found[:, 4:8].std(axis=0).max() < 0.025


def test_a_machine_that_drifts_is_found_out() -> None:
    """Trials that scatter more than their repeats say drift, and are trusted less."""
    sizes = np.unique(np.round(np.geomspace(16, 256, 16)))
    index = list(range(len(sizes)))
    calm = np.log([saturating(30)(int(size)) for size in sizes])
    scattered = calm + 0.05 * np.random.default_rng(3).standard_normal(len(sizes))
    still, drift = curves(sizes, calm, index)
    assert drift < 0.01
    found, drift = curves(sizes, scattered, index)
    assert drift > 0.04
    assert found.std(axis=0).min() > 2 * still.std(axis=0).max()
    assert curves(sizes, calm, index, num_trials=100)[0].std(axis=0).max() < 0.01


def test_the_same_points_give_the_same_draws() -> None:
    """Draws use fixed random numbers."""
    assert np.array_equal(draws(saturating(30), [4, 64]), draws(saturating(30), [4, 64]))


def test_a_prediction_has_less_weight_than_the_plain_shapes() -> None:
    """Over all shapes the weights of those from a prediction add up to as much as those of all bends."""
    without = np.exp(possible_shapes(SIZES, 64)[1]).sum()
    both = np.exp(possible_shapes(SIZES, 64, predicted=lambda sizes: np.zeros_like(sizes))[1]).sum()
    assert both - without == pytest.approx(0.3)
    assert without == pytest.approx(1.3)


@pytest.mark.parametrize("predicted", [None, 50, 150, 10_000])
def test_edges_lie_where_they_can(predicted: int | None) -> None:
    """Every draw is from the largest that fits to the largest that may; both ends are possible."""
    edges = draw_edges(100, 200, is_open=False, predicted=predicted)
    assert len(edges) == NUM_DRAWS
    assert edges.min() >= 100
    assert edges.max() <= 200
    assert edges.max() > 190


def test_an_edge_that_was_never_met() -> None:
    """Where nothing failed and nothing is predicted most draws see no edge; a predicted one draws them near."""
    assert np.median(draw_edges(100, 1000, is_open=True, predicted=None)) == 1000
    assert 250 < np.median(draw_edges(100, 1000, is_open=True, predicted=300)) < 350


def noisy(size: int, count: int, seed: int, deviation: float = 0.05) -> Trial:
    steps = np.exp(np.random.default_rng(seed).normal(0, deviation, count))
    return Trial.from_steps(size, tuple(float(step) for step in steps))


def test_trials_of_a_size_are_pooled() -> None:
    """Repeats add up over trials and the error falls; failed trials are left out; sizes ascend."""
    failed = Trial(batch_size=16, is_ok=False, reason="out of memory")
    once = pool([noisy(8, 4, 0), noisy(4, 4, 1)])
    twice = pool([noisy(8, 4, 0), failed, noisy(4, 4, 1), noisy(8, 4, 2)])
    assert list(twice) == [4, 8]
    assert (once[8].num_trials, twice[8].num_trials) == (1, 2)
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
    assert (estimate.samples_per_second, estimate.num_trials) == (pytest.approx(16.0), 1)


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
