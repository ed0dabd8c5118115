"""Whether what a search found is set, or what the user configured stays: a tuner must not make a run worse.

Pure functions over numbers. A configured size that does not fit cannot stay, whatever the gates say.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from lightning_offload.tuning.noise_scale import NoiseScale, batch_efficiency
from lightning_offload.tuning.search import SearchResult

__all__ = [
    "LEAST_SPEEDUP",
    "Choice",
    "Speedup",
    "is_known_not_to_fit",
    "paying_choice",
    "speedup_of",
    "sure_choice",
    "surely_faster",
]

LEAST_SPEEDUP = 1.05
"""What the lower end of an expected speed-up has to exceed, for the effective batch to change."""
_NORMAL = 1.96  # deviations that hold 95% of a normal distribution
_SURE = 0.975  # probability to be above the lower end of such an interval


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The size that is set.

    Attributes:
        batch_size: Samples of one step on one rank.
        why_kept: Why it is the configured one and not what was found; empty where it is what was found.
    """

    batch_size: int
    why_kept: str = ""


def is_known_not_to_fit(batch_size: int, found: SearchResult) -> bool:
    """Whether trials say that a size is too large."""
    return found.smallest_failing is not None and batch_size >= found.smallest_failing


@dataclass(frozen=True, slots=True, kw_only=True)
class Speedup:
    """By how much a run ends earlier that sees as much progress, what tuning took included.

    Attributes:
        value: The estimate.
        low: Lower end of its interval, by the noise of the trials and of the noise scale.
    """

    value: float
    low: float


def sure_choice(
    found: SearchResult, *, base_size: int, min_confidence: float, speedup: Speedup | None = None
) -> Choice:
    """Choose what was found where that is sure enough, and otherwise the configured size.

    A search that ends early may not know which size is best and know very well that the one that it found is better
    than the configured one. So either makes it sure enough.

    Args:
        found: By the search.
        base_size: The configured size.
        min_confidence: Probability from 0 to 1, below which nothing changes, that the found size is right, or else
            that a run surely ends earlier with it.
        speedup: What is expected of it, where the lower end of its interval says that; None for the first alone.
    """
    if found.batch_size == base_size or found.confidence >= min_confidence or is_known_not_to_fit(base_size, found):
        return Choice(batch_size=found.batch_size)
    if speedup is not None and speedup.low > LEAST_SPEEDUP and min_confidence <= _SURE:
        return Choice(batch_size=found.batch_size)
    return Choice(
        batch_size=base_size,
        why_kept=f"The configured {base_size} is kept: the search is only {found.confidence:.0%} sure of"
        f" {found.batch_size} (min_confidence={min_confidence:g})",
    )


def speedup_of(
    found: SearchResult,
    *,
    base_size: int,
    size: int,
    samples: int = 1,
    noise: NoiseScale | None = None,
    typical: tuple[float, float] = (1.0, 1.0),
    run_seconds: float = math.inf,
    tuning_seconds: float = 0.0,
) -> Speedup | None:
    """Expect what another size does to a run.

    Args:
        found: Trials of both sizes.
        base_size: The configured size.
        size: The other one.
        samples: Of an optimizer step for each of a size: ranks times accumulation.
        noise: The noise scale, where the effective batch changes with the size; None where samples are worth the same.
        typical: What a mean step takes by one of a trial, with the configured size and with the other one.
        run_seconds: What the configured run takes.
        tuning_seconds: What tuning takes.

    Returns:
        None where one of the sizes did not run.
    """
    estimates = {each.batch_size: each for each in found.estimates}
    base, other = estimates.get(base_size), estimates.get(size)
    if base is None or other is None:
        return None
    ratio = other.samples_per_second / base.samples_per_second * typical[0] / typical[1]
    error = 0.0 if base is other else _NORMAL * math.hypot(base.relative_error, other.relative_error)
    values, lows = [ratio], [ratio * max(0.0, 1 - error)]
    if noise is not None:
        batches = {"base_batch": base_size * samples, "batch": size * samples}
        worths = [batch_efficiency(phi, **batches) for phi in (noise.low, noise.value, noise.high)]
        values, lows = [ratio * worths[1]], [lows[0] * worth for worth in worths]

    def with_tuning(speedup: float) -> float:
        if not math.isfinite(run_seconds) or speedup <= 0:
            return speedup
        return run_seconds / (run_seconds / speedup + tuning_seconds)

    return Speedup(value=with_tuning(values[0]), low=with_tuning(min(lows)))


def surely_faster(
    found: SearchResult,
    speedups: Mapping[int, Speedup],
    *,
    base_size: int,
    min_confidence: float,
    least: float = LEAST_SPEEDUP,
) -> SearchResult:
    """What was found, or where it would not be set the size that was tried and surely is faster, if one is.

    A search looks for what is likely best; a smaller step from the configured size may be the only one that is sure.
    How sure the search is of that one is not known, so its confidence is 0.

    Args:
        found: By the search.
        speedups: What is expected of sizes that were tried.
        base_size: The configured size.
        min_confidence: As for :func:`sure_choice`.
        least: As for :func:`paying_choice`.
    """
    own = speedups.get(found.batch_size)
    choice = sure_choice(found, base_size=base_size, min_confidence=min_confidence, speedup=own)
    if found.batch_size == base_size or is_known_not_to_fit(base_size, found):
        return found
    if not choice.why_kept and own is not None and own.low > least:
        return found
    others = {
        size: each.low
        for size, each in speedups.items()
        if size != base_size and each.low > LEAST_SPEEDUP and not is_known_not_to_fit(size, found)
    }
    if not others or min_confidence > _SURE:
        return found
    return replace(found, batch_size=max(others, key=lambda size: others[size]), confidence=0.0)


def paying_choice(
    choice: Choice, speedup: Speedup | None, found: SearchResult, *, base_size: int, least: float = LEAST_SPEEDUP
) -> Choice:
    """Choose a size only where a run is surely faster with it.

    Args:
        choice: What the search would have.
        speedup: What is expected of it; None where that is not known.
        found: By the search.
        base_size: The configured size.
        least: What the lower end has to exceed.
    """
    if choice.batch_size == base_size or is_known_not_to_fit(base_size, found):
        return choice
    if speedup is not None and speedup.low > least:
        return choice
    how = "is not known to be faster" if speedup is None else f"is faster by {speedup.low:.2f} to be sure of"
    return replace(
        choice,
        batch_size=base_size,
        why_kept=f"The configured {base_size} is kept: {choice.batch_size} {how}, tuning included, and {least:g} is the"
        " least that pays",
    )
