"""What trials say about throughput at every size: a distribution over curves, given by draws.

The logarithm of throughput is modelled over the logarithm of the batch size, as a sum of

* a *shape* (:mod:`~.shapes`), known up to a factor: many of them at once, a performance model's prediction among them;
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
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["NUM_DRAWS", "Array", "Points", "draw_curves"]

Array = NDArray[np.float64]

NUM_DRAWS = 384
_OFFSET = 3.0  # deviation of the unknown factor's logarithm, about what the trials give
_ROUGHNESS = 0.002
_RESIDUALS = ((0.005, 6.0, 0.75), (0.04, 4.0, 0.15), (0.2, 2.0, 0.1))
"""Deviation of the residual, octaves over which it changes, and how likely that is before any trial."""
_DRIFTS = ((0.0, 0.95), (0.05, 0.05))
"""Deviation of a machine's speed from trial to trial, which no repeats show, and how likely that is likewise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Points:
    """Sizes that were measured, each once.

    Args:
        index: Where each stands among the sizes of the grid.
        log_speed: Logarithm of its throughput.
        variance: Of that logarithm, by noise alone.
        num_trials: Trials that it is from.
    """

    index: NDArray[np.intp]
    log_speed: Array
    variance: Array
    num_trials: Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Curves:
    """Draws of what may be true.

    Args:
        log_speeds: Logarithms of throughput over the grid, one draw a row.
        drift: Deviation of the machine's speed from trial to trial.
    """

    log_speeds: Array
    drift: float


def draw_curves(sizes: Array, log_shapes: Array, log_weights: Array, points: Points) -> Curves:
    """Draw curves from what is known after some trials.

    Args:
        sizes: The grid, ascending.
        log_shapes: Logarithm of each possible shape over the grid, one a row; each is free by a factor.
        log_weights: Logarithm of how likely each shape is before any trial, up to a constant.
        points: What was measured, at least one.

    Returns:
        The curves, and how much speed drifts.
    """
    at = points.index
    means = log_shapes + np.mean(points.log_speed - log_shapes[:, at], axis=1, keepdims=True)
    octaves = np.log2(sizes)
    distance = np.abs(octaves[:, None] - octaves[None, :])
    kinds = [(*residual, *drift) for residual in _RESIDUALS for drift in _DRIFTS]
    models = [_Model.of(distance, deviation, length, drift, points) for deviation, length, _, drift, _ in kinds]
    log_odds = [
        model.log_evidence(points.log_speed - means[:, at]) + log_weights + np.log(likely * drifts)
        for model, (_, _, likely, _, drifts) in zip(models, kinds, strict=True)
    ]
    chosen = _shares(np.concatenate(log_odds))
    rng = np.random.default_rng(0)
    normal, noise = rng.standard_normal((NUM_DRAWS, len(sizes))), rng.standard_normal((NUM_DRAWS, len(at)))
    draws = np.empty((NUM_DRAWS, len(sizes)))
    for number, model in enumerate(models):
        mine = np.flatnonzero(chosen // len(means) == number)
        draws[mine] = model.draw(means[chosen[mine] % len(means)], points, normal[mine], noise[mine])
    drifts = np.array([drift for *_, drift, _ in kinds])[chosen // len(means)]
    return Curves(log_speeds=draws, drift=float(np.sqrt(np.mean(drifts**2))))


def _shares(log_odds: Array) -> NDArray[np.intp]:
    """Sample systematically: each gets its share of the draws to within one."""
    cumulative = np.cumsum(np.exp(log_odds - log_odds.max()))
    steps = (np.arange(NUM_DRAWS) + 0.5) / NUM_DRAWS * cumulative[-1]
    return np.asarray(np.searchsorted(cumulative, steps), dtype=np.intp)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Model:
    """One size of residual and drift: the covariance over the grid, and that of the points with its inverse."""

    noise: Array
    covariance: Array
    observed: Array
    inverse: Array
    gain: Array

    @classmethod
    def of(cls, distance: Array, deviation: float, length: float, drift: float, points: Points) -> _Model:
        at = points.index
        noise = points.variance + drift**2 / points.num_trials
        covariance = deviation**2 * np.exp(-distance / length) + _OFFSET**2 + _ROUGHNESS**2 * np.eye(len(distance))
        observed = covariance[np.ix_(at, at)] + np.diag(noise)
        inverse: Array = np.asarray(np.linalg.inv(observed), dtype=np.float64)
        return cls(
            noise=noise, covariance=covariance, observed=observed, inverse=inverse, gain=covariance[:, at] @ inverse
        )

    def log_evidence(self, left: Array) -> Array:
        """Logarithm of the density of what each shape leaves over, one shape a row, up to a constant."""
        misfit = np.sum((left @ self.inverse) * left, axis=1)
        return np.asarray(-0.5 * (misfit + np.linalg.slogdet(self.observed)[1]))

    def draw(self, means: Array, points: Points, normal: Array, noise: Array) -> Array:
        """Draw from the prior, then move each draw by what it missed at the points (Matheron's rule)."""
        prior = means + normal @ np.linalg.cholesky(self.covariance).T
        missed = points.log_speed - prior[:, points.index] - noise * np.sqrt(self.noise)
        return np.asarray(prior + missed @ self.gain.T)
