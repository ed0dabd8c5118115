"""What to try next, decided from the trials so far alone.

Without a prediction the search first *grows*: it quadruples until a size does not fit, or gains less than the tolerance
for each doubling. With one it starts at the predicted edge, or at the predicted answer where throughput is
flat from far below the edge. From then on the trial is taken that tells most (:mod:`~.acquisition`), until a size is
probably right.

A pure function of the trials: run again on the same ones it says the same, so a search can be replayed and explained.

A size is *right* on a curve where its throughput is within the tolerance of the best under the budget and no size
much smaller does as well. Over draws of the curve and of the edge of the budget this becomes a probability. The next
trial is the one after which that of the best choice is expected to be highest (the *knowledge gradient*), whatever it
asks: "measure that size again", "does a smaller one do?", or "is there room above?".

Source: Frazier, Powell and Dayanik 2009, The Knowledge-Gradient Policy for Correlated Normal Beliefs.
Shortfall: it looks one trial ahead, and takes no account of what a trial costs.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lightning_offload.errors import TuningError
from lightning_offload.tuning.forecast import Forecast
from lightning_offload.tuning.posterior import (
    Array,
    Estimate,
    draw_curves,
    draw_edges,
    pool,
    possible_shapes,
    repeat_deviation,
    trial_error,
)
from lightning_offload.tuning.sizes import between, grid, round_down
from lightning_offload.tuning.trial import Prediction, Trial

_SLACK = 0.018  # below the tolerance that still counts as right: noise cannot tell much less apart
_MUCH_SMALLER = 0.8  # times as large a size that is as good: the larger one is wrong
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


_CONFIDENT = 0.985  # after which no trial is worth its time
_MANY, _CONFIDENT_BY_NOW = 8, 0.9  # after so many trials with a prediction this is enough: further ones seldom help
_NUM_PROMISING = 14  # sizes among which the next trial is chosen
_GROWTH = 4  # the most from one trial to the next, up
_FEW = 48  # sizes that are all thought of
_SLOW = 0.3  # of the best throughput: below the last such size nothing is modelled
_FAR_BELOW = 4  # how much smaller than the edge a predicted answer is where the edge does not matter
_SHRINK, _SHRINK_PREDICTED = 0.5, 0.7  # after a failure; doubled in effect after each further one


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """What is searched.

    Args:
        low: The smallest size allowed.
        high: The largest size allowed, None for no limit.
        start: Where growth starts, without a usable prediction.
        tolerance: What throughput may fall short of the best, as a fraction.
        sizes: Those that may be tried, ascending; None for all.
        efficiency: What a sample is worth at a size, by what it is at another; throughput times this (goodput) is what
            is to be best. None where samples are worth the same.
        forecast: Usable predictions, which the search asks for; None where there are none.
    """

    low: int = 1
    high: int | None = None
    start: int = 1
    tolerance: float = 0.03
    sizes: Sequence[int] | None = None
    efficiency: Callable[[int], float] | None = None
    forecast: Forecast | None = None

    def narrowed(self) -> Space:
        """The same with limits that are sizes which may be tried, and a start that is one.

        Raises:
            TuningError: There is none between the limits.
        """
        sizes, low, high = self.sizes, self.low, self.high
        if sizes is not None:
            sizes = sizes[bisect.bisect_left(sizes, low) : None if high is None else bisect.bisect_right(sizes, high)]
            if not sizes:
                few = f"{list(self.sizes or ())[:8]}{'...' if len(self.sizes or ()) > 8 else ''}"
                raise TuningError(f"none of the sizes {few} is between {low} and {high}: widen these")
            low, high = sizes[0], sizes[-1]
        narrow = replace(self, sizes=sizes, low=low, high=high)
        return replace(narrow, start=narrow.down(max(low, self.start if high is None else min(self.start, high))))

    def is_within(self, size: int) -> bool:
        """Whether a size is within the limits."""
        return self.low <= size and (self.high is None or size <= self.high)

    def allows(self, size: int) -> bool:
        """Whether a size may be tried."""
        return self.is_within(size) and (self.sizes is None or size in self.sizes)

    def down(self, size: int) -> int:
        """The largest size that may be tried and is not above this one; the smallest where all are."""
        if self.sizes is None:
            return max(self.low, size)
        return self.sizes[max(0, bisect.bisect_right(self.sizes, size) - 1)]

    def up(self, size: int) -> int:
        """The smallest size that may be tried and is not below this one; the largest where all are."""
        if self.sizes is None:
            return size if self.high is None else min(size, self.high)
        return self.sizes[min(len(self.sizes) - 1, bisect.bisect_left(self.sizes, size))]

    def worth(self, size: int) -> float:
        """What a sample is worth at a size."""
        return 1.0 if self.efficiency is None else self.efficiency(size)


EndedBy: TypeAlias = Literal["confidence", "trials", "seconds"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NextTrial:
    """What the search does next.

    Args:
        best: The size that is most probably right of those that ran; None while none did.
        confidence: The probability that it is.
        next_size: The size to try next; None where nothing needs to be tried.
        ended_by: Why the search ends, where it does.
        prediction: What is predicted of the size to try.
    """

    best: int | None
    confidence: float
    next_size: int | None
    ended_by: EndedBy | None = None
    prediction: Prediction | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    """The trials so far, put in order.

    Args:
        fits: Sizes that ran, ascending.
        fails: The smallest size that did not, or None.
        num_trials: All trials.
        num_failed: Those that did not run.
        estimates: Throughput of those that ran.
        error: Expected standard error of one more trial on a calm machine, as a fraction.
    """

    fits: tuple[int, ...]
    fails: int | None
    num_trials: int
    num_failed: int
    estimates: dict[int, Estimate]
    error: float

    @classmethod
    def of(cls, trials: Sequence[Trial]) -> _Known:
        failed = [trial.batch_size for trial in trials if not trial.is_ok]
        # what ran once and failed another time, as an allocator's mood has it, does not fit
        least = min(failed, default=math.inf)
        estimates = {size: estimate for size, estimate in pool(trials).items() if size < least}
        num_repeats = [max(1, len(trial.step_seconds)) for trial in trials if trial.is_ok]
        return cls(
            fits=tuple(estimates),
            fails=min(failed, default=None),
            num_trials=len(trials),
            num_failed=len(failed),
            estimates=estimates,
            error=trial_error(int(median(num_repeats)) if num_repeats else 1, repeat_deviation(trials)),
        )


def decide(space: Space, trials: Sequence[Trial], *, may_grow: bool = True) -> NextTrial:
    """Decide what to try next, and what to choose if nothing more can be tried.

    Args:
        space: What is searched.
        trials: All trials so far.
        may_grow: Without it the best of what ran is chosen even where the search would still grow; while it
            grows there is no best.
    """
    known = _Known.of(trials)
    if not known.fits:
        return NextTrial(best=None, confidence=0.0, next_size=_first(space, known))
    grown = _grow(space, known) if may_grow and space.forecast is None else None
    return _refine(space, known) if grown is None else NextTrial(best=None, confidence=0.0, next_size=grown)


def _first(space: Space, known: _Known) -> int | None:
    """Choose a size while none has run yet; None where not even the smallest does."""
    if known.fails == space.low:
        return None
    forecast = space.forecast
    if forecast is None and (known.fails is None or space.start < known.fails):
        return space.start
    if known.fails is not None:
        shrink = _SHRINK if forecast is None else _SHRINK_PREDICTED
        return space.down(round_down(max(1, int(known.fails * shrink**known.num_failed))))
    assert forecast is not None
    if forecast.answer * _FAR_BELOW < forecast.edge:
        return space.down(forecast.answer)
    return space.down(round_down(forecast.edge))


def _grow(space: Space, known: _Known) -> int | None:
    """Quadruple the largest size, until it does not fit, is the largest allowed, or that gains too little."""
    largest = known.fits[-1]
    if known.fails is not None or largest == space.high or known.num_failed:
        return None
    if len(known.fits) >= 2:
        first, second = (known.estimates[size].samples_per_second * space.worth(size) for size in known.fits[-2:])
        if second < first * (1 + space.tolerance) ** math.log2(largest / known.fits[-2]):
            middle = space.up(2 * known.fits[-2])  # there may be a peak in so wide a gap
            return middle if known.fits[-2] < middle < largest else None
    return space.up(_GROWTH * largest)


def _refine(space: Space, known: _Known) -> NextTrial:
    sizes, beliefs, drift = _beliefs(space, known)
    ran = [index for index, size in enumerate(sizes) if size in known.estimates]
    confidence = beliefs.confidence()
    best = max(ran, key=lambda index: (confidence[index], -index))
    has_many = space.forecast is not None and known.num_trials >= _MANY
    if confidence[best] >= (_CONFIDENT_BY_NOW if has_many else _CONFIDENT):
        return NextTrial(best=sizes[best], confidence=float(confidence[best]), next_size=None)
    error = math.hypot(known.error, drift)
    values = {
        index: expected_confidence(beliefs, ran, index, error) for index in beliefs.promising(_NUM_PROMISING, ran)
    }
    following = max(values, key=lambda index: (round(values[index], 3), -index))
    return NextTrial(best=sizes[best], confidence=float(confidence[best]), next_size=sizes[following])


def _beliefs(space: Space, known: _Known) -> tuple[list[int], Beliefs, float]:
    """Draw curves and edges over the sizes that matter, and find what is right on each; and the machine's drift."""
    forecast, largest = space.forecast, known.fits[-1]
    top = _top(space, known)
    bottom = _bottom(space, known)
    others = {*known.fits, *(between(largest, known.fails) if known.fails is not None else ())}
    others |= {forecast.edge, forecast.answer} if forecast is not None else set()
    sizes = _candidates(space, known, bottom, top, others)
    array = np.array(sizes, dtype=np.float64)
    measured = [estimate for size, estimate in known.estimates.items() if size >= bottom]
    shapes = possible_shapes(array, largest, forecast.log_speeds if forecast is not None else None)
    curves, drift = draw_curves(array, *shapes, measured)
    edge = forecast.edge if forecast is not None and forecast.is_edge_known else None
    edges = draw_edges(largest, top, is_open=known.fails is None, predicted=edge)
    worth = np.log([space.worth(size) for size in sizes])
    return sizes, Beliefs.of(array, curves + worth, edges, space.tolerance), drift


def _candidates(space: Space, known: _Known, bottom: int, top: int, others: set[int]) -> list[int]:
    """List the sizes that come into question: round ones, or all that may be tried where these are few."""
    if space.sizes is None:
        return grid(bottom, top, others)
    inside = space.sizes[bisect.bisect_left(space.sizes, bottom) : bisect.bisect_right(space.sizes, top)]
    if len(inside) > _FEW:
        inside = [space.down(size) for size in grid(bottom, top, others)]
    return sorted({*inside, *(size for size in known.fits if bottom <= size <= top)})


def _top(space: Space, known: _Known) -> int:
    """Return the largest size that comes into question."""
    if known.fails is not None:
        return known.fails - 1
    reach = 2 * max(known.fits[-1], space.forecast.edge if space.forecast is not None else 0)
    return reach if space.high is None else min(reach, space.high)


def _bottom(space: Space, known: _Known) -> int:
    """Return the smallest size that comes into question: one so slow that no smaller one can be the answer.

    That the model fits there as well would only be bought with a worse fit where it matters.
    """
    speeds = {size: each.samples_per_second * space.worth(size) for size, each in known.estimates.items()}
    fastest = max(speeds, key=lambda size: speeds[size])
    return max((n for n in speeds if n < fastest and speeds[n] < _SLOW * speeds[fastest]), default=space.low)
