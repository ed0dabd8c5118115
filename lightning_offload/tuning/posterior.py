"""What trials say about throughput, and about the edge of the budget, at every size: draws from a posterior.

The repeats of all trials of a size are pooled into one *estimate* of its throughput, with its standard error.

What disturbs a step makes it slower, never faster, so only the fastest three in five repeats of a trial count. Location
is the Hodges-Lehmann estimate of their logarithms (the median of all pairs' means), which is off by the same share at
all sizes. The spread of a repeat is taken over all sizes together, from the median distance between two of them: drift
between trials does not count, and few repeats do not mislead.

Source: Hodges and Lehmann 1963, Estimates of location based on rank tests.

A *curve*. The logarithm of throughput is modelled over the logarithm of the batch size, as a sum of

* a *shape*, known up to a factor: many of them at once, a performance model's prediction among them;
* a *residual*, a Gaussian process with an exponential covariance: no shape is quite true, and a prediction is off by
  a factor that changes slowly with size;
* a little roughness of each size on its own;
* noise, which falls with the repeats of all trials of a size together;
* drift of the machine from trial to trial, which falls with their number: other users of a shared machine slow whole
  trials down, and repeats within one say nothing of it.

Neither the shape nor how large residual and drift are gets fitted: they are averaged over, each weighted by its
marginal likelihood. So a curve that obeys a shape is known well after a few trials, since all of them help one
another, and one that does not is believed only near its trials. Draws use fixed random numbers: the same trials give
the same draws.

Source: Rasmussen and Williams, Gaussian Processes for Machine Learning, sections 2.2, 2.7 and 5.4; draws by
Matheron's rule.
Shortfalls: drift is taken as independent from trial to trial, and a slow one looks like a curve; a dip narrower than
the distance between trials is not seen at all.

The *shapes*. A step's seconds are a few plain things, and every combination over a range of constants is one shape:

* fixed seconds and seconds per sample: throughput is ``n / (n + k)`` (launches, the optimizer, weights to be read);
* the longer of the two, where they overlap: ``n / max(n, k)``, and one in between;
* a bend: from some size on each sample costs more, since swapping no longer hides;
* whole tiles: 17 samples may cost what 24 or 32 do;
* what a performance model predicts, where there is one, times a small power of the size: a prediction that is off by
  tens of percent is seldom off by the same at all sizes. Its weight is less than that of the plain shapes: so the
  search was right more often where a prediction is biased.

Each is known up to a factor only. What no shape explains is left to the residual in :mod:`~.posterior`.

The *edge*, between the largest size that fits and the smallest that does not. Without a prediction every place in
between is as likely, in the logarithm. With one the edge is most likely near the predicted one, and one draw in five
still says anywhere.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median

import numpy as np
from numpy.typing import NDArray

from lightning_offload.tuning.trial import Trial

Array = NDArray[np.float64]

NUM_DRAWS = 384  # for a share to be known to 2.5%
_OFFSET = 3.0  # deviation of the unknown factor's logarithm, about what the trials give
_ROUGHNESS = 0.002  # deviation from size to size, which no neighbour tells
_RESIDUALS = ((0.005, 6.0, 0.75), (0.04, 4.0, 0.15), (0.2, 2.0, 0.1))
"""Deviation of the residual, octaves over which it changes, and how likely that is before any trial."""
_DRIFTS = ((0.0, 0.95), (0.05, 0.05))
"""Deviation of a machine's speed from trial to trial, which no repeats show, and how likely that is at first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What all trials of one size say together.

    Args:
        batch_size: Samples of one step on one rank.
        samples_per_second: Of all ranks together.
        relative_error: Standard error of the throughput, as a fraction of it.
        num_trials: Its trials.
    """

    batch_size: int
    samples_per_second: float
    relative_error: float
    num_trials: int


def draw_curves(
    sizes: Array, log_shapes: Array, log_weights: Array, estimates: Sequence[Estimate]
) -> tuple[Array, float]:
    """Draw curves from what is known after some trials.

    Args:
        sizes: The grid, ascending.
        log_shapes: Logarithm of each possible shape over the grid, one a row; each is free by a factor.
        log_weights: Logarithm of how likely each shape is before any trial, up to a constant.
        estimates: What was measured, at least one, of sizes of the grid.

    Returns:
        Logarithms of throughput over the grid, one draw a row; and the deviation of the machine's speed from trial to
        trial.
    """
    at = np.searchsorted(sizes, [each.batch_size for each in estimates])
    log_speed = np.log([each.samples_per_second for each in estimates])
    variance = np.array([each.relative_error**2 for each in estimates])
    num_trials = np.array([float(each.num_trials) for each in estimates])
    means = log_shapes + np.mean(log_speed - log_shapes[:, at], axis=1, keepdims=True)
    octaves = np.log2(sizes)
    distance = np.abs(octaves[:, None] - octaves[None, :])
    kinds = [(*residual, *drift) for residual in _RESIDUALS for drift in _DRIFTS]
    models = [
        _Model.of(distance, deviation, length, at, variance + drift**2 / num_trials)
        for deviation, length, _, drift, _ in kinds
    ]
    log_odds = [
        model.log_evidence(log_speed - means[:, at]) + log_weights + np.log(likely * drifts)
        for model, (_, _, likely, _, drifts) in zip(models, kinds, strict=True)
    ]
    chosen = _shares(np.concatenate(log_odds))
    rng = np.random.default_rng(0)
    normal, noise = rng.standard_normal((NUM_DRAWS, len(sizes))), rng.standard_normal((NUM_DRAWS, len(at)))
    draws = np.empty((NUM_DRAWS, len(sizes)))
    for number, model in enumerate(models):
        mine = np.flatnonzero(chosen // len(means) == number)
        draws[mine] = model.draw(means[chosen[mine] % len(means)], log_speed, normal[mine], noise[mine])
    drifts = np.array([drift for *_, drift, _ in kinds])[chosen // len(means)]
    return draws, float(np.sqrt(np.mean(drifts**2)))


def _shares(log_odds: Array) -> NDArray[np.intp]:
    """Sample systematically: each gets its share of the draws to within one."""
    cumulative = np.cumsum(np.exp(log_odds - log_odds.max()))
    steps = (np.arange(NUM_DRAWS) + 0.5) / NUM_DRAWS * cumulative[-1]
    return np.asarray(np.searchsorted(cumulative, steps), dtype=np.intp)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Model:
    """One size of residual and drift: the covariance over the grid, and that of what was measured with its inverse."""

    at: NDArray[np.intp]
    noise: Array
    covariance: Array
    observed: Array
    inverse: Array
    gain: Array

    @classmethod
    def of(cls, distance: Array, deviation: float, length: float, at: NDArray[np.intp], noise: Array) -> _Model:
        covariance = deviation**2 * np.exp(-distance / length) + _OFFSET**2 + _ROUGHNESS**2 * np.eye(len(distance))
        observed = covariance[np.ix_(at, at)] + np.diag(noise)
        inverse: Array = np.asarray(np.linalg.inv(observed), dtype=np.float64)
        return cls(
            at=at, noise=noise, covariance=covariance, observed=observed, inverse=inverse,
            gain=covariance[:, at] @ inverse,
        )  # fmt: skip

    def log_evidence(self, left: Array) -> Array:
        """Logarithm of the density of what each shape leaves over, one shape a row, up to a constant."""
        misfit = np.sum((left @ self.inverse) * left, axis=1)
        return np.asarray(-0.5 * (misfit + np.linalg.slogdet(self.observed)[1]))

    def draw(self, means: Array, log_speed: Array, normal: Array, noise: Array) -> Array:
        """Draw from the prior, then move each draw by what it missed where there were trials (Matheron's rule)."""
        prior = means + normal @ np.linalg.cholesky(self.covariance).T
        missed = log_speed - prior[:, self.at] - noise * np.sqrt(self.noise)
        return np.asarray(prior + missed @ self.gain.T)


_TILES = (1, 8, 16, 32, 64, 128)
_TILED = 0.5  # weight of all tiles above 1 together
_SHARPNESS = (1.0, 3.0, 64.0)  # seconds are the p-norm of both parts: their sum, in between, the longer one
_NUM_FIXED = 128  # fixed costs that are considered; so close together that none is far from the truth
_TILTS = np.linspace(-0.1, 0.1, 21)  # powers of the size that a prediction may be off by
_BENDS = (0.3, 1.0, 3.0)  # what a sample costs in addition above the bend, in units of what it costs below
_NUM_BENDS = 48  # places of bends that are considered, equally far apart in ratio
_NUM_BENT_FIXED = 64  # fixed costs beside each
_BENT = 0.3  # weight of all bends together, against 1 for the shapes without
_PREDICTED = 0.3  # weight of a prediction, against the same


def possible_shapes(
    sizes: Array, largest: int, predicted: Callable[[Array], Array] | None = None
) -> tuple[Array, Array]:
    """List the shapes over a grid of sizes.

    Args:
        sizes: The grid, ascending.
        largest: The largest size that ran; fixed costs are considered up to several times its seconds.
        predicted: A performance model's logarithm of throughput at any sizes.

    Returns:
        Logarithms of throughput, one shape a row, each free by a factor; and those of how likely each is before any
        trial, up to a constant.
    """
    groups = [*_without_bend(sizes, largest), *_with_bend(sizes, largest)]
    if predicted is not None:
        groups += [(_PREDICTED * _tile_weight(tile), _filled(sizes, tile, _tilted(predicted))) for tile in _TILES]
    log_weights = [np.full(len(rows), np.log(weight / len(rows))) for weight, rows in groups]
    return np.concatenate([rows for _, rows in groups]), np.concatenate(log_weights)


def _without_bend(sizes: Array, largest: int) -> list[tuple[float, Array]]:
    fixed = np.geomspace(max(0.25, sizes[0] / 16), 8 * max(largest, 8), _NUM_FIXED)[:, None]
    return [
        (_tile_weight(tile) / len(_SHARPNESS), _filled(sizes, tile, _norm(fixed, sharpness)))
        for tile in _TILES
        for sharpness in _SHARPNESS
    ]


def _norm(fixed: Array, sharpness: float) -> Callable[[Array], Array]:
    return lambda sizes: np.asarray(-np.logaddexp(0, sharpness * np.log(fixed / sizes)) / sharpness)


def _tilted(predicted: Callable[[Array], Array]) -> Callable[[Array], Array]:
    return lambda sizes: np.asarray(predicted(sizes) + _TILTS[:, None] * np.log(sizes))


def _with_bend(sizes: Array, largest: int) -> list[tuple[float, Array]]:
    fixed = np.geomspace(max(0.25, sizes[0] / 16), 4 * max(largest, 8), _NUM_BENT_FIXED)[:, None, None]
    bends = np.geomspace(max(2.0, sizes[0]), max(largest, 8), _NUM_BENDS)[:, None]
    seconds = [sizes + fixed + more * np.maximum(0, sizes - bends) for more in _BENDS]
    return [(_BENT / len(_BENDS), np.log(sizes / time).reshape(-1, len(sizes))) for time in seconds]


def _filled(sizes: Array, tile: int, log_speeds: Callable[[Array], Array]) -> Array:
    """Charge each size for whole tiles."""
    whole = np.ceil(sizes / tile) * tile
    return np.asarray(log_speeds(whole) + np.log(sizes / whole))


def _tile_weight(tile: int) -> float:
    return 1 - _TILED if tile == 1 else _TILED / (len(_TILES) - 1)


_DEVIATION = 0.2  # of a predicted edge's logarithm
_DOUBT = 5  # one draw in so many does not heed the prediction
_OPEN = 0.8  # share of draws that see no edge where none was met or predicted


def draw_edges(fits: int, top: int, *, is_open: bool, predicted: int | None) -> Array:
    """Draw the largest size that fits.

    Args:
        fits: The largest that is known to fit.
        top: The largest that comes into question.
        is_open: Nothing failed yet, so there may be no edge below `top` at all.
        predicted: The predicted edge, where a model predicts one.

    Returns:
        One size a draw, from `fits` to `top`.
    """
    rng = np.random.default_rng(1)
    spread = rng.permutation((np.arange(NUM_DRAWS) + 0.5) / NUM_DRAWS)
    draws = fits * ((top + 1) / fits) ** spread
    number = np.arange(NUM_DRAWS)
    if predicted is not None:
        near = predicted * np.exp(_DEVIATION * rng.standard_normal(NUM_DRAWS))
        is_used = (near >= fits) & (near < top + 1) & (number % _DOUBT != 0)
        draws = np.where(is_used, near, draws)
    elif is_open:
        draws = np.where(number < _OPEN * NUM_DRAWS, top, draws)
    return np.floor(draws).clip(fits, top)


_EFFICIENCY = 0.8  # of the estimate against the mean of all, for a handful of repeats
_USUAL_DEVIATION = 0.03  # of a repeat, before any was measured
_USUAL_COUNT = 4  # how many pairs of repeats that guess is worth
_DRIFT = 0.005  # of the calmest machine from trial to trial; how much more there is, the curves tell
_UNDISTURBED = 0.6  # of the repeats of a trial
_MEDIAN_DISTANCES = (1.0, 1.0, 0.954, 0.691, 0.734, 0.63, 0.663, 0.687, 0.625, 0.651, 0.607)
"""Of two of the fastest three in five of so many normal numbers, in deviations; simulated."""


def repeat_deviation(trials: Iterable[Trial]) -> float:
    """Estimate the relative deviation of a single timed step."""
    distances = [
        abs(math.log(a / b)) / _MEDIAN_DISTANCES[min(len(trial.step_seconds), len(_MEDIAN_DISTANCES) - 1)]
        for trial in trials
        if trial.is_ok
        for a, b in itertools.combinations(undisturbed(trial.step_seconds), 2)
    ]
    if not distances:
        return _USUAL_DEVIATION
    measured = median(distances)
    count = len(distances)
    return math.sqrt((_USUAL_COUNT * _USUAL_DEVIATION**2 + count * measured**2) / (_USUAL_COUNT + count))


def undisturbed(step_seconds: Sequence[float]) -> list[float]:
    """The fastest three in five repeats: what disturbs a step only ever makes it slower."""
    return sorted(step_seconds)[: math.ceil(_UNDISTURBED * len(step_seconds))]


def pool(trials: Sequence[Trial]) -> dict[int, Estimate]:
    """Pool the trials that went well, by size, ascending."""
    deviation = repeat_deviation(trials)
    by_size: dict[int, list[Trial]] = {}
    for trial in trials:
        if trial.is_ok:
            by_size.setdefault(trial.batch_size, []).append(trial)
    return {size: _pooled(size, by_size[size], deviation) for size in sorted(by_size)}


def trial_error(num_repeats: int, deviation: float, num_trials: int = 1) -> float:
    """Standard error of the throughput that trials of a size have together, as a fraction of it."""
    return math.sqrt(deviation**2 / (_EFFICIENCY * max(1, num_repeats)) + _DRIFT**2 / num_trials)


def _pooled(size: int, trials: list[Trial], deviation: float) -> Estimate:
    logs = [log for trial in trials for log in _log_speeds(trial)]
    middle = median(fmean(pair) for pair in itertools.combinations_with_replacement(logs, 2))
    num_repeats = sum(max(1, len(trial.step_seconds)) for trial in trials)
    return Estimate(
        batch_size=size,
        samples_per_second=math.exp(middle),
        relative_error=trial_error(num_repeats, deviation, len(trials)),
        num_trials=len(trials),
    )


def _log_speeds(trial: Trial) -> list[float]:
    """Throughput of each undisturbed repeat, of all ranks together: the trial's, scaled by its share of the median."""
    assert trial.samples_per_second is not None  # it is ok
    speed = math.log(trial.samples_per_second)
    if not trial.step_seconds:
        return [speed]
    middle = math.log(median(trial.step_seconds))
    return [speed + middle - math.log(seconds) for seconds in undisturbed(trial.step_seconds)]
