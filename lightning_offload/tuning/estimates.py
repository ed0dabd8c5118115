"""Pools the repeats of all trials of a size into one throughput and its standard error.

Location is the Hodges-Lehmann estimate of the step times' logarithms (the median of all pairs' means): nearly as
exact as the mean, and one slow step does not move it far. The spread of a repeat is taken over all sizes together,
from the median distance between two repeats of one trial: drift between trials does not count, and few repeats do not
mislead.

Source: Hodges and Lehmann 1963, Estimates of location based on rank tests.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from lightning_offload.tuning.trial import Trial

__all__ = ["Estimate", "pool", "repeat_deviation", "trial_error"]

_EFFICIENCY = 0.9  # of the estimate against the mean, for a handful of repeats
_USUAL_DEVIATION = 0.03  # of a repeat, before any was measured
_USUAL_COUNT = 4  # how many pairs of repeats that guess is worth
_DRIFT = 0.005  # of the calmest machine from trial to trial; how much more there is, the curves tell
_MEDIAN_DISTANCE = 0.9539  # of two normal numbers, in deviations


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What all trials of one size say together.

    Args:
        batch_size: Samples of one step on one rank.
        samples_per_second: Of all ranks together.
        relative_error: Standard error of the throughput, as a fraction of it.
        num_repeats: Timed steps, of all its trials.
        num_trials: Its trials.
    """

    batch_size: int
    samples_per_second: float
    relative_error: float
    num_repeats: int
    num_trials: int


def repeat_deviation(trials: Iterable[Trial]) -> float:
    """Estimate the relative deviation of a single timed step."""
    distances = [
        abs(math.log(a / b))
        for trial in trials
        if trial.is_ok
        for a, b in itertools.combinations(trial.step_seconds, 2)
    ]
    if not distances:
        return _USUAL_DEVIATION
    measured = median(distances) / _MEDIAN_DISTANCE
    count = len(distances)
    return math.sqrt((_USUAL_COUNT * _USUAL_DEVIATION**2 + count * measured**2) / (_USUAL_COUNT + count))


def pool(trials: Sequence[Trial]) -> dict[int, Estimate]:
    """Pool the trials that went well, by size, ascending."""
    deviation = repeat_deviation(trials)
    by_size: dict[int, list[Trial]] = {}
    for trial in trials:
        if trial.is_ok:
            by_size.setdefault(trial.batch_size, []).append(trial)
    return {size: _pooled(size, by_size[size], deviation) for size in sorted(by_size)}


def trial_error(num_repeats: int, deviation: float) -> float:
    """Standard error of one trial's throughput, as a fraction of it."""
    return math.sqrt(deviation**2 / (_EFFICIENCY * max(1, num_repeats)) + _DRIFT**2)


def _pooled(size: int, trials: list[Trial], deviation: float) -> Estimate:
    logs = [log for trial in trials for log in _log_speeds(trial)]
    middle = median(fmean(pair) for pair in itertools.combinations_with_replacement(logs, 2))
    error = math.sqrt(deviation**2 / (_EFFICIENCY * len(logs)) + _DRIFT**2 / len(trials))
    return Estimate(
        batch_size=size,
        samples_per_second=math.exp(middle),
        relative_error=error,
        num_repeats=len(logs),
        num_trials=len(trials),
    )


def _log_speeds(trial: Trial) -> list[float]:
    """Throughput of each repeat, of all ranks together: the trial's, scaled by the repeat's share of the median."""
    assert trial.samples_per_second is not None  # it is ok
    speed = math.log(trial.samples_per_second)
    if not trial.step_seconds:
        return [speed]
    middle = math.log(median(trial.step_seconds))
    return [speed + middle - math.log(seconds) for seconds in trial.step_seconds]
