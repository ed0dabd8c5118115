"""How long a run is in optimizer steps, and when the batch changes: as many samples, so fewer or more steps.

`max_steps` and `min_steps` are given for the configured batch, and so are a `limit_train_batches` and a
`val_check_interval` that are numbers of batches and not shares of an epoch. Any other epoch has as many samples
whatever the batch is. Schedules that count steps are as long as the run when the model makes them anew; one that is not
(it was made from a number that is older than the tuning, or by steps whatever the run is) ends the run at another rate.
"""

from __future__ import annotations

import contextlib
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from lightning_offload.callbacks.tuning.result import TuningResult
from lightning_offload.callbacks.tuning.trainer_facts import accumulation_of, accumulation_schedule, replaced
from lightning_offload.errors import TuningError

__all__ = [
    "RunLength",
    "StepLimits",
    "check_schedules",
    "is_number_of_batches",
    "run_batches",
    "seconds_allowed",
    "step_schedules",
    "why_not_resumed",
]

_LIMITS = ("max_steps", "min_steps")
_ABOUT = 0.05
"""Share of the run by which a length may differ, and share of the rate by which the run's last one may."""
_MOST_ENDS = 16
"""Numbers of steps at which a run may end that are looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLength:
    """Optimizer steps of a run as it is configured.

    Attributes:
        total: Of all of it; infinite where that is not known.
        left: Those that are left, where the run goes on from a checkpoint.
        done: Those that were made before, with whatever batch.
    """

    total: float = math.inf
    left: float = math.inf
    done: int = 0

    @classmethod
    def of(cls, trainer: Any) -> RunLength:
        """Look at a Trainer at the start of a fit; may make its loaders."""
        checkpoint = trainer._checkpoint_connector._loaded_checkpoint
        done = int(checkpoint.get("global_step", 0))
        is_known = accumulation_schedule(trainer) is None and trainer.estimated_stepping_batches > 0
        if not is_known:
            return cls(done=done)
        total = left = float(trainer.estimated_stepping_batches)
        if checkpoint and trainer.max_steps != -1:
            left = min(left, trainer.max_steps - done)
        if checkpoint and math.isfinite(batches := run_batches(trainer)):
            # of today's batch, though the epochs before may have had another
            share = 1 - checkpoint.get("epoch", 0) / max(1, trainer.max_epochs)
            left = min(left, math.ceil(share * batches / trainer.accumulate_grad_batches))
        return cls(total=total, left=max(0.0, left), done=done)


def seconds_allowed(trainer: Any) -> float:
    """What `max_time`, or a Timer of Lightning's, leaves of a run; infinite without one."""
    timers = [callback for callback in trainer.callbacks if type(callback).__name__ == "Timer"]
    left = [timer.time_remaining() for timer in timers]
    return min([seconds for seconds in left if seconds is not None], default=math.inf)


def why_not_resumed(trainer: Any, *, keeps_batch: bool) -> str:
    """Why a run that goes on from a checkpoint of an untuned one cannot have another size; empty where it can.

    Args:
        trainer: At the start of the fit, whose checkpoint is read and not in force yet.
        keeps_batch: Whether an optimizer step goes on seeing as many samples.
    """
    checkpoint = trainer._checkpoint_connector._loaded_checkpoint
    if not checkpoint.get("optimizer_states"):
        return ""
    if not keeps_batch and step_schedules(trainer):
        return "the checkpoint's schedules count steps of its batch"
    progress = checkpoint.get("loops", {}).get("fit_loop", {}).get("epoch_loop.batch_progress", {})
    if progress.get("current", {}).get("ready") and not progress.get("is_last_batch"):
        return "the checkpoint is from the midst of an epoch, of which it counts the batches"
    return ""


def run_batches(trainer: Any) -> float:
    """Batches of the run, whatever is accumulated; infinite where that is not known."""
    is_limited = trainer.max_epochs is not None and trainer.max_epochs >= 0
    return float(trainer.num_training_batches * max(1, trainer.max_epochs)) if is_limited else math.inf


def scaled_steps(num_steps: int, ratio: Fraction, done: int = 0) -> int:
    """Steps that see as many samples as so many did.

    Args:
        num_steps: Of the configured batch; -1 and 0 mean no limit.
        ratio: The new effective batch by the configured one.
        done: Steps of the configured batch that were made before.
    """
    if num_steps <= done:
        return num_steps
    return done + math.ceil((num_steps - done) / ratio)


def is_number_of_batches(limit: Any) -> bool:
    """Whether a `limit_train_batches` counts batches; a float is a share of them."""
    return isinstance(limit, int) and not isinstance(limit, bool)


class StepLimits:
    """The Trainer's limits in steps and batches, and its accumulation: changed for a fit and put back after it."""

    def __init__(self) -> None:
        self._changes = contextlib.ExitStack()

    def set(self, trainer: Any, result: TuningResult) -> str:
        """Set the limits for another batch; tell what was changed, in a sentence without its full stop.

        Args:
            trainer: At the start of a fit.
            result: Has the new batch and the configured one, of a rank and of an optimizer step.
        """
        if accumulation_of(trainer) == result.configured_accumulation != result.accumulation:
            self._change(trainer, "accumulate_grad_batches", result.accumulation)
        told, loop = [], trainer.fit_loop.epoch_loop
        for name in _LIMITS:
            before = getattr(loop, name)
            if before is None or before == (after := scaled_steps(before, result.batch_ratio, result.first_step)):
                continue
            self._change(loop, name, after)
            told.append(f"{name} is {after}, which is as many samples as {before} steps of the configured batch")
        limit = trainer.limit_train_batches
        if is_number_of_batches(limit) and (scaled := scaled_steps(limit, result.size_ratio)) != limit:
            self._change(trainer, "limit_train_batches", scaled)
            told.append(f"limit_train_batches is {scaled}, which is as many samples as {limit} batches as configured")
        interval, ratio = trainer.val_check_interval, result.size_ratio
        # Within an epoch Lightning refuses one that is longer; a shorter one than it was never is.
        if is_number_of_batches(interval) and (ratio > 1 or trainer.check_val_every_n_epoch is None):
            scaled = max(1, int(interval / ratio))
            if scaled != interval:
                self._change(trainer, "val_check_interval", scaled)
                told.append(f"val_check_interval is {scaled}, which is as many samples as {interval} batches were")
        return "; ".join(told)

    def put_back(self) -> None:
        """Set what the user gave."""
        self._changes.close()

    def _change(self, holder: Any, name: str, value: int) -> None:
        self._changes.enter_context(replaced(holder, **{name: value}))


def step_schedules(trainer: Any) -> list[Any]:
    """Lightning's configs of the schedules of a run that count optimizer steps."""
    return [config for config in trainer.strategy.lr_scheduler_configs if config.interval == "step"]


def check_schedules(
    before: Sequence[Any], after: Sequence[Any], *, num_steps: float, ratio: Fraction, num_epochs: int = 0
) -> None:
    """See that schedules are those of the run that begins: that it ends at the rate at which the configured one does.

    Args:
        before: :func:`step_schedules` of the configured batch.
        after: The same, made anew for the found one.
        num_steps: Optimizer steps of the run with the configured batch; infinite where that is not known.
        ratio: The found effective batch by the configured one.
        num_epochs: Of the run, each of which may have one step more than as many samples take.

    Raises:
        TuningError: One is for another number of steps.
    """
    if not math.isfinite(num_steps):
        return
    num_after = scaled_steps(int(num_steps), ratio)
    if abs(num_after - num_steps) <= _ABOUT * num_steps:
        return
    ends = range(num_after, num_after + max(0, num_epochs) + 1, max(1, num_epochs // _MOST_ENDS))
    for old, new in zip(before, after, strict=False):
        if isinstance(length := getattr(new.scheduler, "total_steps", None), int):  # which can be asked for no rate
            was = getattr(old.scheduler, "total_steps", None)
            is_right = length != was or abs(length - num_steps) > _ABOUT * num_steps
        else:
            last = _shares_at(old.scheduler, int(num_steps) // old.frequency)
            is_right = any(_are_near(last, _shares_at(new.scheduler, end // new.frequency)) for end in ends)
        if not is_right:
            raise TuningError(
                f"{type(new.scheduler).__name__} is for the {num_steps:g} steps of the run with the configured batch"
                f" size, and with the found one it has {num_after:g}: make it in configure_optimizers() from"
                " self.trainer.estimated_stepping_batches, so that it ends with the run"
            )


def _are_near(one: Sequence[float], other: Sequence[float]) -> bool:
    return all(abs(share - its) <= _ABOUT for share, its in zip(one, other, strict=False))


def _shares_at(scheduler: Any, step: int) -> list[float]:
    """What a schedule has made of each group's rate after so many steps; nothing where it cannot be asked."""
    if functions := getattr(scheduler, "lr_lambdas", None):
        return [float(function(step)) for function in functions]
    parts, closed = getattr(scheduler, "_schedulers", ()), getattr(scheduler, "_get_closed_form_lr", None)
    if parts and (milestones := getattr(scheduler, "_milestones", None)) is not None:
        place = bisect_right(milestones, step)
        return _shares_at(parts[place], step - (milestones[place - 1] if place else 0))
    if parts:
        shares = [_shares_at(part, step) for part in parts]
        return [math.prod(each) for each in zip(*shares, strict=True)] if all(shares) else []
    if closed is None:
        return []
    with replaced(scheduler, last_epoch=step):
        rates = closed()
    return [float(rate) / float(base) if base else 1.0 for rate, base in zip(rates, scheduler.base_lrs, strict=True)]
