"""The search for the efficiency-optimal batch size: the smallest whose throughput is about the best under the budget.

Larger batches use a device better up to a point; beyond it they only cost memory, and statistical efficiency. So the
size looked for is neither the largest that fits nor the fastest to within noise, but the smallest within `tolerance`
of the fastest under the budget.

Trials are few and noisy: a median of four repeats that scatter by 5% is off by 3%, as much as the usual tolerance. So
no two trials are compared directly. All of them, repeats of one size pooled, give a distribution over throughput
curves and over where the budget ends (:mod:`~.posterior`), and from these comes how probable it is that
each size is right. "Undecided, measure again" and "bisect the edge" are trials like any other, taken where they tell
most (:mod:`~.acquisition`); the edge is not looked for where throughput is flat far below it. A
performance model's prediction is one of the shapes a curve may have: trials recalibrate it by a smooth factor, and it
is dropped where they contradict it.

Ranks: what `run` returns must be the same on every rank (:func:`~.ranks.agreed`). Rank 0 decides, so that neither
its clock nor the last bit of a float can lead ranks apart; where deciding fails there, every rank raises.

Sources: AccUDNN (arXiv 1901.06773) tunes for the efficiency-optimal minibatch of a memory-optimised model; how it
searches is not public, and this is not its method. AdaptDL and Pollux (OSDI'21) maximise *goodput*, throughput times
statistical efficiency, and change the size while training; here the size is fixed before it, learning rate and
statistical efficiency being the caller's.

Shortfalls: without a prediction a curve that rises again after a flat quadrupling is not followed, and a sharp dip or
peak between measured sizes may be missed. It is taken that whatever is smaller than a size that fits, fits too. One
trial's cost is not weighed against another's.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from lightning_offload.errors import TuningError
from lightning_offload.tuning.acquisition import EndedBy, NextTrial, Space, decide
from lightning_offload.tuning.forecast import Forecast
from lightning_offload.tuning.posterior import Estimate, pool
from lightning_offload.tuning.ranks import Coordinator
from lightning_offload.tuning.trial import Predict, Prediction, Run, Trial

__all__ = ["MAX_TRIALS", "MAX_TRIALS_PREDICTED", "EndedBy", "SearchResult", "find_batch_size"]

MAX_TRIALS = 24
MAX_TRIALS_PREDICTED = 12
"""Trials of a search without `max_trials`: without a performance model, and with one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """What the search found.

    Args:
        batch_size: The size chosen; it ran.
        confidence: How probably it is right, given the trials, from 0 to 1.
        trials: All trials in order, with what was predicted for each.
        estimates: Throughput of each size that ran, repeats of all its trials pooled, by size.
        largest: The largest size that was found to fit; there may be larger ones that were not needed.
        smallest_failing: The smallest size that was found not to fit, None if all did.
        ended_by: Why the search ended: it was sure enough, or trials or seconds ran out.
    """

    batch_size: int
    confidence: float
    trials: tuple[Trial, ...]
    estimates: tuple[Estimate, ...]
    largest: int
    smallest_failing: int | None
    ended_by: EndedBy

    @classmethod
    def of(cls, trials: Sequence[Trial], *, batch_size: int, confidence: float, ended_by: EndedBy) -> SearchResult:
        """Sum up the trials of a search; at least one ran."""
        fails = min((trial.batch_size for trial in trials if not trial.is_ok), default=None)
        ran = [trial.batch_size for trial in trials if trial.is_ok]
        return cls(
            batch_size=batch_size,
            confidence=confidence,
            trials=tuple(trials),
            estimates=tuple(pool(trials).values()),
            largest=max((size for size in ran if fails is None or size < fails), default=batch_size),
            smallest_failing=fails,
            ended_by=ended_by,
        )

    @property
    def is_exhausted(self) -> bool:
        """Whether trials or seconds ran out before the search was sure."""
        return self.ended_by != "confidence"


def find_batch_size(
    run: Run,
    space: Space,
    *,
    predict: Predict | None = None,
    max_trials: int | None = None,
    max_seconds: float | None = None,
    clock: Callable[[], float] = time.monotonic,
    known: Sequence[Trial] = (),
    agreement: Coordinator | None = None,
) -> SearchResult:
    """Find the smallest batch size whose throughput is within a tolerance of the best under the budget.

    Args:
        run: Runs a trial of a size; the same on every rank. It may be called with a size again.
        space: What is searched.
        predict: Predicts throughput and whether a size fits, for any size; called on rank 0 only.
        max_trials: Calls of `run`; 12 with a usable prediction and 24 without, unless given.
        max_seconds: No trial is begun that would probably end later, except the first.
        clock: Seconds, from any start.
        known: Trials that were run before, the same on every rank; they count among the trials, but for those of sizes
            that are not allowed, which the result has and the search does not heed.
        agreement: Of the ranks that search together, the same that `run` uses; None for one process.

    Returns:
        The size and how it was found.

    Raises:
        TuningError: No size may be tried, or none was found to fit.
    """
    ranks = agreement if agreement is not None else Coordinator()
    space = space.narrowed()
    outside = [trial for trial in known if not space.is_within(trial.batch_size)]
    trials = [trial for trial in known if space.is_within(trial.batch_size)]
    # of those that ran before, about: half of a trial is timed
    durations = {trial.batch_size: 2 * sum(trial.step_seconds) for trial in known if trial.step_seconds}
    began = clock()

    def predicted() -> Space:
        forecast = Forecast.of(predict, low=space.low, high=space.high, tolerance=space.tolerance, worth=space.worth)
        return replace(space, forecast=forecast)

    def decided(space: Space) -> NextTrial:
        """What all ranks do next, on rank 0."""
        following = decide(space, trials)
        size = following.next_size
        if size is None:
            return replace(following, ended_by="confidence")
        ended_by: EndedBy | None = None
        expected = clock() - began + _expected_seconds(size, trials, durations)
        if len(trials) >= (max_trials or (MAX_TRIALS if space.forecast is None else MAX_TRIALS_PREDICTED)):
            ended_by = "trials"
        elif max_seconds is not None and expected > max_seconds and any(trial.is_ok for trial in trials):
            ended_by = "seconds"  # without one that fits there is nothing to choose
        if ended_by is not None:
            return replace(decide(space, trials, may_grow=False), ended_by=ended_by)
        return following if predict is None else replace(following, prediction=predict(size))

    is_first = ranks.rank == 0
    space = ranks.together(lambda: predicted() if is_first else space, "deciding")
    while True:
        told = ranks.together(lambda: decided(space) if is_first else None, "deciding")
        following = ranks.broadcast(told)
        assert following is not None  # rank 0 has decided
        size, best, ended_by = following.next_size, following.best, following.ended_by
        if ended_by is not None or size is None:
            break
        since = clock()
        trial = run(size)
        durations[size] = clock() - since
        if trial.batch_size != size:
            raise TuningError(f"run({size}) returned a trial of batch size {trial.batch_size}: return that of {size}")
        trials.append(_with_prediction(trial, following.prediction))
    if best is None or ended_by is None:
        raise _no_size_fits(trials, space.low, ended_by)
    return SearchResult.of(
        (*outside, *trials), batch_size=best, confidence=following.confidence, ended_by=ended_by
    )  # fmt: skip


def _expected_seconds(size: int, trials: Sequence[Trial], durations: dict[int, float]) -> float:
    """What a trial of a size takes, by the nearest size that ran; 0 where nothing tells."""
    ran = {trial.batch_size for trial in trials if trial.is_ok} & durations.keys() or durations.keys()
    if not ran:
        return 0.0
    nearest = min(ran, key=lambda tried: abs(math.log(tried / size)))
    return durations[nearest] * max(1.0, size / nearest)


def _with_prediction(trial: Trial, prediction: Prediction | None) -> Trial:
    """Note what was predicted, where the trial does not say so itself."""
    if prediction is None:
        return trial
    speed, peak = trial.predicted_samples_per_second, trial.predicted_peak_bytes
    return replace(
        trial,
        predicted_samples_per_second=prediction.samples_per_second if speed is None else speed,
        predicted_peak_bytes=prediction.peak_bytes if peak is None else peak,
    )


def _no_size_fits(trials: Sequence[Trial], min_size: int, ended_by: EndedBy | None) -> TuningError:
    smallest = min(trials, key=lambda trial: trial.batch_size)
    reason = smallest.reason or "no reason was given"
    if smallest.batch_size <= min_size:
        return TuningError(
            f"no batch size fits: the smallest allowed, {min_size}, failed ({reason}); "
            "raise the budget, or make the model or its input smaller"
        )
    return TuningError(
        f"no batch size was found to fit from {min_size} on before {ended_by} ran out: the smallest of "
        f"{len(trials)} trials, {smallest.batch_size}, failed ({reason}); start with a smaller size"
    )
