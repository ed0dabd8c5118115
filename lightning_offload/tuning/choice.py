"""Which batch size is probably right, and which trial would tell most.

A size is *right* on a curve where its throughput is within the tolerance of the best under the budget and no size much
smaller does as well. Over draws of the curve and of the edge of the budget this becomes a probability. The next trial
is the one after which that of the best choice is expected to be highest (the *knowledge gradient*), whatever it
asks: "measure that size again", "does a smaller one do?", or "is there room above?".

Source: Frazier, Powell and Dayanik 2009, The Knowledge-Gradient Policy for Correlated Normal Beliefs.
Shortfall: it looks one trial ahead, and takes no account of what a trial costs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_offload.tuning.curve import Array

__all__ = ["Beliefs", "expected_confidence"]

_SLACK = 0.018  # below the tolerance that still counts as right: noise cannot tell much less apart
_MUCH_SMALLER = 0.8
_NUM_ANSWERS = 24  # of a trial that are thought through, each with an error to either side
_ERROR = 0.8  # the mean size of a normal number, in deviations
_NOTHING = 1e-12  # weight that no draw falls below


@dataclass(frozen=True, slots=True, kw_only=True)
class Beliefs:
    """Draws of what may be true.

    Args:
        sizes: The grid, ascending.
        curves: Logarithm of throughput over the grid, one draw a row.
        edges: The largest size that fits, in each draw.
        is_right: 1 where a size is right in a draw, else 0.
        answers: Index of the smallest size within the tolerance, in each draw.
        bests: Index of the fastest size, in each draw.
    """

    sizes: Array
    curves: Array
    edges: Array
    is_right: Array
    answers: NDArray[np.intp]
    bests: NDArray[np.intp]

    @classmethod
    def of(cls, sizes: Array, curves: Array, edges: Array, tolerance: float) -> Beliefs:
        """Find in each draw what is right."""
        speeds = np.where(sizes[None, :] <= edges[:, None], curves, -np.inf)
        best = speeds.max(axis=1, keepdims=True)
        as_good = _crossing(sizes, speeds, best + math.log1p(-tolerance / 2))
        is_small = _MUCH_SMALLER * sizes[None, :] <= as_good[:, None]
        is_fast = speeds >= best + math.log(max(1 - tolerance - _SLACK, _NOTHING))
        return cls(
            sizes=sizes,
            curves=curves,
            edges=edges,
            is_right=(is_small & is_fast).astype(np.float64),
            answers=np.argmax(speeds >= best + math.log1p(-tolerance), axis=1),
            bests=np.argmax(speeds, axis=1),
        )

    def confidence(self) -> Array:
        """Probability that each size is right."""
        return np.asarray(self.is_right.mean(axis=0))

    def promising(self, num_sizes: int, known: Sequence[int]) -> list[int]:
        """List the sizes that are most often the answer, the best, or right: a trial of any other tells little."""
        length = len(self.sizes)
        counts = np.bincount(self.answers, minlength=length) + np.bincount(self.bests, minlength=length)
        interest = counts / len(self.curves) + self.confidence()
        interest[list(known)] += _NOTHING  # of those that never are, one that ran can still be measured again
        order = np.argsort(-interest, kind="stable")[:num_sizes]
        return [int(index) for index in order if interest[index] > 0]


def expected_confidence(beliefs: Beliefs, known: Sequence[int], index: int, error: float) -> float:
    """Expect how probably right the best choice is after one more trial.

    Args:
        beliefs: What is known now.
        known: Indices of the sizes that ran, at least one; only these can be chosen.
        index: Of the size to try.
        error: Standard error of the trial's throughput, as a fraction of it.

    Returns:
        A probability, averaged over what the trial may answer.
    """
    fits = beliefs.edges >= beliefs.sizes[index]
    value = 0.0
    if not fits.all():
        value += float(beliefs.is_right[~fits][:, list(known)].mean(axis=0).max() * (~fits).mean())
    if fits.any():
        speeds = beliefs.curves[fits, index]
        rights = beliefs.is_right[np.ix_(fits, sorted({*known, index}))]
        seen = np.quantile(speeds, (np.arange(_NUM_ANSWERS) + 0.5) / _NUM_ANSWERS)
        seen = np.concatenate([seen - _ERROR * error, seen + _ERROR * error])
        weights = np.exp(-0.5 * ((seen[:, None] - speeds[None, :]) / error) ** 2) + _NOTHING
        after = (weights @ rights) / weights.sum(axis=1, keepdims=True)
        value += float(after.max(axis=1).mean() * fits.mean())
    return value


def _crossing(sizes: Array, speeds: Array, level: Array) -> Array:
    """Find the smallest size at which each draw reaches a level, between the sizes of the grid."""
    after = np.argmax(speeds >= level, axis=1)
    before = np.maximum(after - 1, 0)
    rows = np.arange(len(speeds))
    low, high = speeds[rows, before], speeds[rows, after]
    share = np.where(after > 0, (level[:, 0] - low) / np.maximum(high - low, _NOTHING), 1.0)
    return np.asarray(np.ceil(sizes[before] + share * (sizes[after] - sizes[before])))
