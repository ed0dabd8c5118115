"""Times of two kinds of step taken in turns, and how far their ratio can be trusted.

Times on a shared machine drift by more than the differences of interest. Two steps that follow each other see nearly
the same machine, so each pair gives one ratio; which of the two goes first alternates. The median ratio comes with a
95% bootstrap interval (percentile method, fixed seed).

Known shortfall: neighbouring pairs are not independent when the machine drifts slowly, so the interval is somewhat too
narrow.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy import stats


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedTimes:
    """Seconds of the steps of each pair.

    Attributes:
        plain_seconds: Times of the plain step.
        other_seconds: Times of the step it is compared with, in the same order.
    """

    plain_seconds: tuple[float, ...]
    other_seconds: tuple[float, ...]

    @property
    def ratios(self) -> list[float]:
        """Other over plain, pair by pair."""
        pairs = zip(self.other_seconds, self.plain_seconds, strict=True)
        return [other / plain for other, plain in pairs]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """A median ratio and its 95% interval."""

    median: float
    low: float
    high: float


def ratio_of(times: PairedTimes) -> Ratio:
    """Return the median of the pairs' ratios with its 95% bootstrap interval."""
    interval = stats.bootstrap(
        (times.ratios,), np.median, confidence_level=0.95, method="percentile", rng=np.random.default_rng(0)
    ).confidence_interval
    return Ratio(median=float(np.median(times.ratios)), low=float(interval.low), high=float(interval.high))
