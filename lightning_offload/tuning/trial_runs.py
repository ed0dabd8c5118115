"""Trials of a batch size with the user's own training function, which is stopped once enough is known.

Protocol: a trial calls the function with a batch size, inside a :class:`~.step_timer.StepMeter`, and the meter ends it
from inside an optimizer step, by an exception that passes through the function (a ``BaseException``: ``except
Exception`` lets it through, ``finally`` and ``with`` run).

Several ranks go in rounds: at each reading of the clock, and when its function ends in any other way, a rank says how
it fares, and all stop in the round in which one has to. Gradients are not synchronised during trials, so that none
waits for those of a rank that ran out of memory; what their exchange would add is measured between trials. Collectives
of the function's own between the start of a step and its optimizer step remain unsafe: an out-of-memory error on one
rank leaves the others waiting there. An error of one rank, whenever it comes, is an error on all.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median

import torch

from lightning_offload.errors import BudgetInfeasibleError, TuningError
from lightning_offload.plugins.out_of_memory import release_frames
from lightning_offload.tuning.allreduce_cost import Exchanges
from lightning_offload.tuning.predictions import Predictions, fit_predictor, pace_of
from lightning_offload.tuning.ranks import Coordinator, agreed
from lightning_offload.tuning.snapshot import Restore
from lightning_offload.tuning.step_timer import RankStatus, Seen, StepMeter, TrialOver, TrialSettings
from lightning_offload.tuning.trial import Trial

__all__ = ["ENDED_EARLY", "FunctionTrials", "run_trial"]

ENDED_EARLY = "training ended after"
"""How the reason of a trial begins whose function returned before anything could be timed."""
_STOPPED = "another rank stopped"


class FunctionTrials:
    """The trials of one search.

    Args:
        function: Trains with a batch size.
        restores: Put back, after each trial, what it changed.
        settings: How long a trial is.
        agreement: Among the ranks.

    Attributes:
        done: Those that ran.
    """

    def __init__(
        self,
        function: Callable[[int], object],
        restores: Sequence[Restore],
        settings: TrialSettings,
        agreement: Coordinator,
    ) -> None:
        self.done: list[Trial] = []
        self._function, self._restores = function, restores
        self._settings, self._agreement = settings, agreement
        self._exchanges = Exchanges(agreement, settings.clock)
        self._seen: dict[int, Seen | None] = {}

    def run(self, batch_size: int) -> Trial:
        """Try a size on every rank; each leaves with the same trial, and as it was."""
        try:
            trial = run_trial(
                self._function, batch_size, self._settings, self._agreement,
                exchanges=self._exchanges, note=lambda seen: self._seen.update({batch_size: seen}),
            )  # fmt: skip
        except BaseException:
            self._restore()
            raise
        self._agreement.together(self._restore, f"putting back what the trial of batch size {batch_size} changed")
        self.done.append(trial)
        return trial

    def record(self, first: int, *, low: int, high: int | None, most: int, until: float | None) -> Predictions:
        """Try a few sizes first, where a memory plugin shows their steps, and fit a performance model to these.

        Args:
            first: The first size; the only one where it fits and no plugin watches.
            low: The smallest size allowed.
            high: The largest, None for no limit.
            most: Most sizes.
            until: When to stop, by `time.monotonic`, None for no limit; rank zero's clock counts.
        """
        waiting = [first]
        while waiting and len(self._seen) < most and len(self.done) < 2 * most and not self._is_late(until):
            size = waiting.pop(0)
            if self.run(size).is_ok:
                if not self._agreement.is_true_on_all(self._is_watched):
                    break
                waiting = waiting or [2 * size, size // 2, 4 * size]
            elif not self._seen:
                waiting = [size // 4]
            tried = {trial.batch_size for trial in self.done}
            waiting = [n for n in waiting if low <= n and (high is None or n <= high) and n not in tried]
        return self._predictions()

    def _is_late(self, until: float | None) -> bool:
        if until is None or not self.done:
            return False
        return self._agreement.broadcast(time.monotonic() >= until)

    @property
    def _is_watched(self) -> bool:
        """Whether a plugin showed the steps of all trials that were ok."""
        return all(each is not None and each.recorded.planned is not None for each in self._seen.values())

    def _predictions(self) -> Predictions:
        """Fit the performance model, if plugins have shown enough."""
        agreement = self._agreement
        seen = {size: each for size, each in self._seen.items() if each is not None}
        recorded = {size: each.recorded for size, each in seen.items()}
        predictor = None
        if seen:
            last = seen[max(seen)]
            predictor = fit_predictor(
                recorded, budget_bytes=last.budget_bytes, policy=last.policy, num_ranks=agreement.num_ranks
            )
        return Predictions(predictor, agreement, pace_of(predictor, recorded, agreement.num_ranks))

    def _restore(self) -> None:
        for restore in self._restores:
            restore()


def run_trial(
    function: Callable[[int], object],
    batch_size: int,
    settings: TrialSettings,
    agreement: Coordinator,
    *,
    exchanges: Exchanges | None = None,
    note: Callable[[Seen | None], object] = lambda _: None,
) -> Trial:
    """Try a batch size; every rank calls it, and all get the same trial.

    Args:
        function: Trains with a batch size.
        batch_size: The size.
        settings: How long.
        agreement: Among the ranks.
        exchanges: Tells what the gradients' exchange takes, for several ranks; None to time it in this trial.
        note: Told what a memory plugin saw of the steps of a trial that is ok; None without one.

    Raises:
        TuningError: The function failed on another rank.
        Exception: Whatever the function raised on this one, unless it says that the size does not fit.
    """
    meter = StepMeter(settings, agreement)
    fate, reason, failure = RankStatus.ENDED, "", None
    try:
        with meter.measuring():
            function(batch_size)
    except TrialOver as over:
        fate = RankStatus.HAS_ENOUGH
        release_frames(over)
    except Exception as error:
        if isinstance(error, (torch.OutOfMemoryError, BudgetInfeasibleError)) or settings.is_out_of_memory(error):
            fate, reason = RankStatus.DOES_NOT_FIT, str(error).partition("\n")[0]
            release_frames(error)
        else:
            fate, failure = RankStatus.FAILED, error
    finally:
        _free_device_memory()
    if meter.fate is None:
        meter.ends(fate)
    what = f"the training function at batch size {batch_size}"
    agreement.raise_together(failure, what)  # whether it came before all had stopped, or after
    if meter.fate is RankStatus.FAILED:
        raise TuningError(f"{what} failed on another rank: see its error")
    own = _reason(meter, fate, reason or meter.excess, settings)
    is_ok = agreement.is_true_on_all(not own)
    exchanges = exchanges or Exchanges(agreement, settings.clock)
    added = _exposed_seconds(meter, agreement, exchanges) if is_ok else 0.0
    trial = agreed(_trial(batch_size, meter, own, added=added), agreement)
    if is_ok:
        note(meter.seen)
    if is_ok or agreement.num_ranks == 1:
        return trial
    reasons = agreement.gather(own)  # the first rank that failed may have stopped for another
    told = next(
        (f"rank {rank}: {each}" for rank, each in enumerate(reasons) if each not in ("", _STOPPED)), trial.reason
    )
    return replace(trial, reason=told)


def _reason(meter: StepMeter, fate: RankStatus, reason: str, settings: TrialSettings) -> str:
    """Why the trial is not ok on this rank, whose function ended so; empty where it is."""
    if reason:
        return reason
    if meter.fate is RankStatus.DOES_NOT_FIT:
        return _STOPPED
    if not meter.step_seconds:
        needed = settings.warmup_steps + 1
        early = f"{ENDED_EARLY} {meter.num_steps} optimizer steps, a trial takes at least {needed}"
        return early if fate is RankStatus.ENDED else _STOPPED
    return ""


def _exposed_seconds(meter: StepMeter, agreement: Coordinator, exchanges: Exchanges) -> float:
    """What exchanging the gradients would add to a step."""
    if agreement.num_ranks == 1:
        return 0.0
    exchange = exchanges.of(meter.withheld.traffic)
    return meter.withheld.num_per_step * exchange.exposed_seconds(median(meter.step_seconds))


def _trial(batch_size: int, meter: StepMeter, reason: str, *, added: float) -> Trial:
    seconds = tuple(each + added for each in meter.step_seconds)
    return Trial(
        batch_size=batch_size,
        is_ok=not reason,
        samples_per_second=None if reason else batch_size / median(seconds),
        peak_bytes=meter.peak_bytes,
        step_seconds=seconds,
        reason=reason,
    )


def _free_device_memory() -> None:
    gc.collect()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
