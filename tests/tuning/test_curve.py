"""Draws of the curve and of the edge say what the trials say, and no more."""

from __future__ import annotations

import numpy as np
import pytest

from lightning_offload.tuning.posterior import (
    NUM_DRAWS,
    Array,
    Curves,
    Points,
    draw_curves,
    draw_edges,
    possible_shapes,
)
from tests.tuning.curves import Curve, peaked, saturating, stepped

SIZES = np.array([2.0**power for power in range(1, 11)])


def curves(sizes: Array, log_speed: Array, index: list[int], error: float = 0.01, num_trials: int = 1) -> Curves:
    shapes = possible_shapes(sizes, int(sizes[index].max()))
    number = len(index)
    points = Points(
        index=np.array(index, dtype=np.intp),
        log_speed=log_speed,
        variance=np.full(number, error**2),
        num_trials=np.full(number, float(num_trials)),
    )
    return draw_curves(sizes, shapes.log_speeds, shapes.log_weights, points)


def draws(curve: Curve, measured: list[int], error: float = 0.01) -> Array:
    index = [int(np.flatnonzero(size == SIZES)[0]) for size in measured]
    return curves(SIZES, np.log([curve(size) for size in measured]), index, error).log_speeds


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
    assert curves(sizes, calm, index).drift < 0.01
    found = curves(sizes, scattered, index)
    assert found.drift > 0.04
    assert found.log_speeds.std(axis=0).min() > 2 * curves(sizes, calm, index).log_speeds.std(axis=0).max()
    assert curves(sizes, calm, index, num_trials=100).log_speeds.std(axis=0).max() < 0.01


def test_the_same_points_give_the_same_draws() -> None:
    """Draws use fixed random numbers."""
    assert np.array_equal(draws(saturating(30), [4, 64]), draws(saturating(30), [4, 64]))


def test_a_prediction_has_less_weight_than_the_plain_shapes() -> None:
    """Over all shapes the weights of those from a prediction add up to as much as those of all bends."""
    without = np.exp(possible_shapes(SIZES, 64).log_weights).sum()
    both = np.exp(possible_shapes(SIZES, 64, predicted=lambda sizes: np.zeros_like(sizes)).log_weights).sum()
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
