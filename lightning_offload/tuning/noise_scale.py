"""How large a batch still pays: the gradient noise scale, and what another batch does to a run's progress.

The *noise scale* of a model at some point of its training is ``phi = tr(Sigma) / |G|^2``: the variance of one sample's
gradient, summed over parameters, by the square of the true gradient. A step with a batch of ``B`` samples makes
``1 / (1 + phi / B)`` of the progress that one without noise would make, at the best learning rate of each (McCandlish
et al. 2018, arXiv:1812.06162, equation 2.6). So a run that takes batches of ``B`` samples in place of ``B0`` needs
``(phi + B) / (phi + B0)`` times the samples, and *goodput* is throughput by that (Qiao et al. 2021, Pollux, OSDI).

Both parts are estimated from steps whose gradient is the mean of ``N`` micro-gradients of ``b`` samples each, be these
accumulated, of several ranks, or halves of one batch (appendix A.1 of the same paper). With ``S`` the mean square of a
micro-gradient and ``L`` the square of the mean gradient, ``|G|^2 = (N L - S) / (N - 1)`` and
``tr(Sigma) = b N (S - L) / (N - 1)`` are unbiased. Their ratio is not, so both are averaged over steps first. The
interval is Fieller's (1954, Some problems in interval estimation): the values that a ratio of two means may have; it is
open above where the true gradient cannot be told from none.

Shortfalls: parameters count as they are, though Adam steps by preconditioned gradients; a preconditioner's small
denominators make the estimate useless (AdaptDL's varies twentyfold over seeds). Micro-gradients have to be independent:
batch norm over more than one of them would tie them together. The law holds near an optimum that is a quadratic bowl,
and ``phi`` rises during a training (Merrill et al. 2025, arXiv:2505.23971), so an early one favours small batches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

__all__ = [
    "GradientSquares",
    "NoiseScale",
    "batch_efficiency",
    "estimate_noise_scale",
    "likely_efficiency",
]

MIN_STEPS = 8
"""Steps below which there is no estimate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientSquares:
    """The squared norms of one step's gradients, over all parameters.

    Attributes:
        micro: Mean over the micro-gradients of their squares.
        mean: Square of their mean.
        num_micro: How many there are; at least 2 where signal and noise are asked for.
        micro_size: Samples of one.
    """

    micro: float
    mean: float
    num_micro: int
    micro_size: int

    @property
    def signal(self) -> float:
        """An unbiased estimate of the true gradient's square; may be negative."""
        return (self.num_micro * self.mean - self.micro) / (self.num_micro - 1)

    @property
    def noise(self) -> float:
        """An unbiased estimate of the variance of one sample's gradient, summed over parameters; may be negative."""
        return self.micro_size * self.num_micro * (self.micro - self.mean) / (self.num_micro - 1)

    @property
    def is_finite(self) -> bool:
        """Whether a step can be counted: one whose loss overflowed in half precision cannot."""
        return math.isfinite(self.micro) and math.isfinite(self.mean)


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseScale:
    """The gradient noise scale, in samples.

    Attributes:
        value: The estimate; infinite where no gradient can be told from the noise.
        low: Lower end of the interval that holds the true one with a probability of 95%.
        high: Upper end; may be infinite.
    """

    value: float
    low: float
    high: float


def estimate_noise_scale(steps: Sequence[GradientSquares]) -> NoiseScale | None:
    """Estimate the noise scale from some steps.

    Args:
        steps: Of about one place in the training; those that are not finite are left out.

    Returns:
        None where there are too few.
    """
    finite = [step for step in steps if step.is_finite]
    if len(finite) < MIN_STEPS:
        return None
    noise, signal = [step.noise for step in finite], [step.signal for step in finite]
    mean_noise, mean_signal = fmean(noise), fmean(signal)
    value = math.inf if mean_signal <= 0 else max(0.0, mean_noise / mean_signal)
    low, high = _fieller(noise, signal)
    return NoiseScale(value=value, low=min(low, value), high=max(high, value))


def _fieller(above: Sequence[float], below: Sequence[float]) -> tuple[float, float]:
    """The non-negative values that the ratio of two means may have, with a probability of 95%."""
    number = len(above)
    mean_above, mean_below = fmean(above), fmean(below)
    share = _student(number - 1) ** 2 / (number * (number - 1))
    square_above = share * sum((a - mean_above) ** 2 for a in above)
    square_below = share * sum((b - mean_below) ** 2 for b in below)
    product = share * sum((a - mean_above) * (b - mean_below) for a, b in zip(above, below, strict=True))
    # all t with (mean_above - t mean_below)^2 <= variance of that difference: p t^2 - 2 q t + r <= 0
    p, q, r = mean_below**2 - square_below, mean_above * mean_below - product, mean_above**2 - square_above
    discriminant = q * q - p * r
    if p > 0:
        root = math.sqrt(max(0.0, discriminant))
        return (max(0.0, (q - root) / p), max(0.0, (q + root) / p)) if mean_below > 0 else (0.0, math.inf)
    if r <= 0 or discriminant < 0 or p == 0:  # any ratio may be the true one
        return 0.0, math.inf
    root = math.sqrt(discriminant)
    return max(0.0, *((q + sign * root) / p for sign in (1, -1))), math.inf


def _student(degrees: int) -> float:
    """The 97.5% quantile of Student's distribution (Cornish and Fisher's expansion)."""
    z = 1.959964
    return z + (z**3 + z) / (4 * degrees) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)


def batch_efficiency(noise_scale: float, *, base_batch: float, batch: float) -> float:
    """The progress that a sample makes in another batch, by what it makes in the base batch.

    Above 1 for a smaller batch and below it for a larger one (McCandlish et al. 2018, equation 2.7).

    Args:
        noise_scale: In samples; may be infinite.
        base_batch: Effective batch, in samples, to compare with.
        batch: Effective batch, in samples.
    """
    if math.isinf(noise_scale):
        return 1.0
    return (noise_scale + base_batch) / (noise_scale + batch)


def likely_efficiency(noise: NoiseScale, *, base_batch: float, batch: float) -> float:
    """The same where only an interval is known: the geometric mean of what its two ends say.

    What is best by it loses about as large a share of the best progress whichever end is the true one. By the worse end
    alone far too small a batch is best where the interval is open above.

    Args:
        noise: The noise scale, with its interval.
        base_batch: Effective batch, in samples, to compare with.
        batch: Effective batch, in samples.
    """
    ends = (batch_efficiency(phi, base_batch=base_batch, batch=batch) for phi in (noise.low, noise.high))
    return math.sqrt(math.prod(ends))
