"""A performance model is asked for few sizes, and only trusted where it says something."""

from __future__ import annotations

import numpy as np
import pytest

from lightning_offload.tuning.forecast import Forecast
from lightning_offload.tuning.trial import Predict, Prediction
from tests.tuning.curves import Curve, saturating


def model(curve: Curve, edge: int, asked: list[int] | None = None) -> Predict:
    def predict(size: int) -> Prediction:
        if asked is not None:
            asked.append(size)
        speed = curve(size) if size <= edge else None
        return Prediction(batch_size=size, is_feasible=size <= edge, samples_per_second=speed)

    return predict


def test_edge_and_answer() -> None:
    """The edge is found to within a few percent, the answer to within a round size, with few predictions."""
    asked: list[int] = []
    forecast = Forecast.of(model(saturating(10), 777, asked), low=1, high=4096, tolerance=0.03)
    assert forecast is not None
    assert 0.97 * 777 <= forecast.edge <= 777
    assert forecast.is_edge_known
    assert 192 <= forecast.answer <= 256  # 242 is the first within 3% of 777's throughput
    assert len(set(asked)) <= 32


def test_hopeless_sizes_are_not_asked_for() -> None:
    """Below the sizes that could be the answer the model is asked for the smallest alone."""
    asked: list[int] = []
    Forecast.of(model(saturating(500), 4096, asked), low=1, high=4096, tolerance=0.03)
    assert sorted(set(asked))[:2] == [1, 256]


def test_no_edge_within_the_limit() -> None:
    """Where all is predicted to fit the edge is the limit, and not known."""
    forecast = Forecast.of(model(saturating(10), 10**6), low=1, high=4096, tolerance=0.03)
    assert forecast is not None
    assert (forecast.edge, forecast.is_edge_known) == (4096, False)


def test_without_a_limit_it_stops_where_nothing_is_gained() -> None:
    """Doubling ends on a plateau, and at a predicted edge."""
    flat = Forecast.of(model(saturating(10), 10**12), low=1, high=None, tolerance=0.03)
    assert flat is not None
    assert flat.edge < 10**5
    edged = Forecast.of(model(saturating(10), 300), low=1, high=None, tolerance=0.03)
    assert edged is not None
    assert (290 <= edged.edge <= 300, edged.is_edge_known) == (True, True)


def test_interpolation() -> None:
    """In between throughput is interpolated; at a size that was asked for it is what was said."""
    forecast = Forecast.of(model(saturating(10), 512), low=1, high=512, tolerance=0.03)
    assert forecast is not None
    at = forecast.log_speeds(np.array([64.0, 80.0, 512.0, 9999.0]))
    assert np.exp(at[[0, 2, 3]]) == pytest.approx([saturating(10)(64), saturating(10)(512), saturating(10)(512)])
    assert np.exp(at[1]) == pytest.approx(saturating(10)(80), rel=0.01)


def test_predictions_that_cannot_be_used(subtests: pytest.Subtests) -> None:
    """Without throughputs, or where nothing is predicted to fit, there is no forecast."""
    for predict in [
        None,
        lambda size: None,
        lambda size: Prediction(batch_size=size, is_feasible=False),
        lambda size: Prediction(batch_size=size, is_feasible=True),
        lambda size: Prediction(batch_size=size, is_feasible=True, samples_per_second=0.0),
    ]:
        with subtests.test(predict=predict):
            assert Forecast.of(predict, low=1, high=4096, tolerance=0.03) is None
