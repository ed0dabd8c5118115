"""Whether what a search found is set, or what the user configured stays: a tuner must not make a run worse.

Pure functions over numbers. A configured size that does not fit cannot stay, whatever the gates say.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from lightning_offload.tuning.noise_scale import NoiseScale, batch_efficiency
from lightning_offload.tuning.search import SearchResult

__all__ = ["LEAST_SPEEDUP", "Choice", "Speedup", "choose", "expected_speedups"]

LEAST_SPEEDUP = 1.05
"""What the lower end of an expected speed-up has to exceed, for the effective batch to change."""
_NORMAL = 1.96  # deviations that hold 95% of a normal distribution
_SURE = 0.975  # probability to be above the lower end of such an interval


@dataclass(frozen=True, slots=True, kw_only=True)
class Speedup:
    """How many times as early a run ends that makes as much progress, what tuning took included.

    Attributes:
        value: The estimate.
        low: Lower end of its interval, by the noise of the trials and of the noise scale.
        high: Its upper end.
    """

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The size that is set.

    Attributes:
        batch_size: Samples of one step on one rank.
        best_size: What is best as far as is known; another one where that is not sure enough to be set.
        confidence: How probably that is right; 0 where it is only known to be faster than the configured one.
        why_kept: Why it is the configured one; empty where it is the best.
        speedup: What is expected of the best; None where that is not known.
    """

    batch_size: int
    best_size: int
    confidence: float
    why_kept: str = ""
    speedup: Speedup | None = field(default=None, compare=False)


def choose(
    found: SearchResult,
    speedups: Mapping[int, Speedup],
    *,
    base_size: int,
    min_confidence: float,
    least: float | None,
) -> Choice:
    """Choose what was found where that is sure enough, else a size that is surely faster, else the configured one.

    A search that ends early may not know which size is best and know very well that one is better than the configured
    one; a smaller step from that may be the only one that is sure.

    Args:
        found: By the search.
        speedups: What is expected of sizes that were tried.
        base_size: The configured size.
        min_confidence: Probability from 0 to 1, below which nothing changes, that the found size is right, or else
            that a run surely ends earlier with the one that is set.
        least: What the lower end of its speed-up has to exceed where the search is sure of it; None for nothing.
    """
    size, confidence = found.batch_size, found.confidence
    fails = found.smallest_failing
    own = speedups.get(size)
    best = Choice(batch_size=size, best_size=size, confidence=confidence, speedup=own)
    fits = fails is None or base_size < fails or any(t.is_ok for t in found.trials if t.batch_size == base_size)
    if size == base_size or not fits:
        return best
    is_sure, may_be_unsure = confidence >= min_confidence, min_confidence <= _SURE
    if is_sure and (least is None or (own is not None and own.low > least)):
        return best
    if own is not None and own.low > LEAST_SPEEDUP and may_be_unsure:
        return best
    others = {
        other: each.low
        for other, each in speedups.items()
        if other != base_size and each.low > LEAST_SPEEDUP and (fails is None or other < fails)
    }
    if others and may_be_unsure:
        other = max(others, key=lambda each: others[each])
        return Choice(batch_size=other, best_size=other, confidence=0.0, speedup=speedups[other])
    why = _why_kept(found, own, is_sure=is_sure, min_confidence=min_confidence, least=least)
    return replace(best, batch_size=base_size, why_kept=why)


def _why_kept(
    found: SearchResult, own: Speedup | None, *, is_sure: bool, min_confidence: float, least: float | None
) -> str:
    size = found.batch_size
    if not is_sure:
        return f"the search is only {found.confidence:.0%} sure of {size} (min_confidence={min_confidence:g})"
    if own is None:
        return f"{size} is not known to be faster, tuning included"
    return (
        f"with {size} the run ends {own.low:.2f} to {own.high:.2f} times as early, tuning included, and"
        f" {LEAST_SPEEDUP if least is None else least:g} at least is what pays"
    )


def expected_speedups(
    found: SearchResult,
    *,
    base_size: int,
    samples: int = 1,
    noise: NoiseScale | None = None,
    mean_length: Callable[[int], float] = lambda _: 1.0,
    run_seconds: float = math.inf,
    tuning_seconds: float = 0.0,
) -> dict[int, Speedup]:
    """Expect what each size that ran does to a run; nothing where the configured one did not run.

    Args:
        found: Trials of the sizes.
        base_size: The configured size.
        samples: Of an optimizer step for each of a size: ranks times accumulation.
        noise: The noise scale, where the effective batch changes with the size; None where samples are worth the same.
        mean_length: What a mean step of a size takes by one of a trial.
        run_seconds: What the configured run takes.
        tuning_seconds: What tuning takes.
    """
    base = next((each for each in found.estimates if each.batch_size == base_size), None)
    if base is None:
        return {}

    def with_tuning(speedup: float) -> float:
        if not math.isfinite(run_seconds) or speedup <= 0:
            return speedup
        return run_seconds / (run_seconds / speedup + tuning_seconds)

    speedups = {}
    for each in found.estimates:
        size = each.batch_size
        ratio = each.samples_per_second / base.samples_per_second * mean_length(base_size) / mean_length(size)
        error = 0.0 if each is base else _NORMAL * math.hypot(base.relative_error, each.relative_error)
        worths = [1.0] * 3
        if noise is not None:
            batches = {"base_batch": base_size * samples, "batch": size * samples}
            worths = [batch_efficiency(phi, **batches) for phi in (noise.value, noise.low, noise.high)]
        speedups[size] = Speedup(
            value=with_tuning(ratio * worths[0]),
            low=with_tuning(ratio * max(0.0, 1 - error) * min(worths)),
            high=with_tuning(ratio * (1 + error) * max(worths)),
        )
    return speedups
