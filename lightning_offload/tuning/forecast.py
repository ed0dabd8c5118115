"""Asks a performance model where it matters: the edge it predicts, and the throughput from there down.

A prediction costs a plan, which may take seconds for a large model, so few sizes are asked for: some to bisect the
edge, then two to the octave downwards until throughput is so low that no size below can be the answer, even if the
prediction is wrong by tens of percent, and then every round size about the predicted answer and about the best. In
between, throughput is interpolated.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from lightning_offload.tuning.posterior import Array
from lightning_offload.tuning.sizes import between, grid
from lightning_offload.tuning.trial import Predict, Prediction

__all__ = ["Forecast"]

_HOPELESS = 0.4  # of the best predicted throughput: no error of a prediction makes such a size the answer
_FLAT = 0.002  # gain by doubling below which a prediction without a largest size goes no further
_BITS = 2  # significant bits of the sizes that are asked for: two to the octave

_Answer: TypeAlias = tuple[Prediction, float]
"""A prediction, and its throughput by what that is worth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """A performance model's predictions that can be used.

    Args:
        predictions: With a throughput, by size, ascending.
        edge: The largest size that was asked for and is predicted to fit.
        is_edge_known: False where everything that was asked for is predicted to fit.
        answer: The smallest size that is predicted to be within the tolerance of the best.
    """

    predictions: tuple[Prediction, ...]
    edge: int
    is_edge_known: bool
    answer: int

    @classmethod
    def of(
        cls,
        predict: Predict | None,
        *,
        low: int,
        high: int | None,
        tolerance: float,
        worth: Callable[[int], float] = lambda _: 1.0,
    ) -> Forecast | None:
        """Ask a model.

        Args:
            predict: The model.
            low: The smallest size.
            high: The largest, None for no limit.
            tolerance: How much of the best may be lost for a smaller size.
            worth: What throughput at a size is multiplied by before it is compared.

        Returns:
            None without a model, or where it cannot tell, or where it says that not even the smallest size fits:
            then it is trials that decide.
        """
        if predict is None or _feasible(predict, low) is None:
            return None
        top = high if high is not None else _plateau(predict, low, worth)
        edge = _edge(predict, low, top)
        found = _downwards(predict, low, edge, worth)
        if len(found) < min(2, edge - low + 1):
            return None
        answer = _answer(found, tolerance)
        for centre in {answer, max(found, key=lambda size: found[size][1])}:
            _ask(predict, grid(max(low, centre // 2), min(edge, 2 * centre)), found, worth)
        return cls(
            predictions=tuple(found[size][0] for size in sorted(found)),
            edge=edge,
            is_edge_known=edge != top,
            answer=_answer(found, tolerance),
        )

    def log_speeds(self, sizes: Array) -> Array:
        """Interpolate the logarithm of throughput; beyond both ends it stays as it is there."""
        known = np.log([prediction.batch_size for prediction in self.predictions])
        speeds = np.log([prediction.samples_per_second or math.nan for prediction in self.predictions])
        return np.interp(np.log(sizes), known, speeds)


def _feasible(predict: Predict, size: int) -> Prediction | None:
    prediction = predict(size)
    return prediction if prediction is not None and prediction.is_feasible else None


def _plateau(predict: Predict, low: int, worth: Callable[[int], float]) -> int:
    """Double until it does not fit, or twice in a row gives nothing; return where that was."""
    speed, num_flat, size = 0.0, 0, low
    while (prediction := _feasible(predict, size)) is not None:
        now = (prediction.samples_per_second or 0.0) * worth(size)
        num_flat = num_flat + 1 if now <= speed * (1 + _FLAT) else 0
        if num_flat == 2:
            break
        speed, size = now, 2 * size
    return size


def _edge(predict: Predict, low: int, high: int) -> int:
    """Bisect the largest feasible size, among round sizes and then between the last two; `low` is feasible."""
    if _feasible(predict, high) is not None:
        return high
    fits, fails = _last_two(predict, grid(low, high))
    return _last_two(predict, [fits, *between(fits, fails), fails])[0]


def _last_two(predict: Predict, sizes: Sequence[int]) -> tuple[int, int]:
    """Return the last feasible size and the one after it; the first is feasible and the last is not."""
    after = bisect.bisect_left(sizes, True, lo=1, hi=len(sizes) - 1, key=lambda n: _feasible(predict, n) is None)
    return sizes[after - 1], sizes[after]


def _downwards(predict: Predict, low: int, edge: int, worth: Callable[[int], float]) -> dict[int, _Answer]:
    """Predict from the edge down, two to the octave, until it is hopeless."""
    found: dict[int, _Answer] = {}
    for size in reversed(grid(low, edge, bits=_BITS)):
        speed = _ask(predict, [size], found, worth)
        if len(found) > 1 and speed < _HOPELESS * max(best for _, best in found.values()):
            break
    return found


def _ask(predict: Predict, sizes: Sequence[int], found: dict[int, _Answer], worth: Callable[[int], float]) -> float:
    """Add what can be used of a model's predictions; return what the last is worth, 0 where there is none."""
    last = 0.0
    for size in sizes:
        prediction = _feasible(predict, size)
        last = ((prediction.samples_per_second if prediction is not None else None) or 0.0) * worth(size)
        if prediction is not None and 0 < last < math.inf:
            found[size] = (prediction, last)
    return last


def _answer(found: dict[int, _Answer], tolerance: float) -> int:
    best = max(speed for _, speed in found.values())
    return min(size for size, (_, speed) in found.items() if speed >= (1 - tolerance) * best)
