"""How long a run is in optimizer steps, and when the batch changes: as many samples, so fewer or more steps.

`max_steps` and `min_steps` are given for the configured batch, and so is a `limit_train_batches` that is a number of
batches and not a share of them. Any other epoch has as many samples whatever the batch is. Schedules that count steps
are as long as the run when the model makes them anew; one that was made from a number that is older than the tuning is
found by its length, which is still the old one.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from lightning_offload.callbacks.tuning.result import TuningResult
from lightning_offload.callbacks.tuning.trainer_facts import accumulation_of, accumulation_schedule, replaced
from lightning_offload.errors import TuningError

__all__ = ["RunLength", "StepLimits", "check_lengths", "is_number_of_batches", "run_batches", "schedule_lengths"]

_LIMITS = ("max_steps", "min_steps")
_LENGTHS = ("total_steps", "T_max", "total_iters")
_KEYWORDS = ("num_training_steps", "total_steps", "max_steps", "num_steps")
"""What functions of a step are usually given, as those of transformers' schedules."""
_ABOUT = 0.05  # share of the run: a schedule of nearly its length is meant to be as long


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
        return "; ".join(told)

    def put_back(self) -> None:
        """Set what the user gave."""
        self._changes.close()

    def _change(self, holder: Any, name: str, value: int) -> None:
        self._changes.enter_context(replaced(holder, **{name: value}))


def schedule_lengths(configs: Sequence[Any]) -> list[tuple[str, float]]:
    """The names and lengths, in steps, of the schedules that count optimizer steps, by Lightning's configs."""
    return [found for config in configs if config.interval == "step" for found in _lengths(config.scheduler)]


def _lengths(scheduler: Any) -> Iterator[tuple[str, float]]:
    keywords = [getattr(function, "keywords", None) or {} for function in getattr(scheduler, "lr_lambdas", ())]
    places = [
        *((name, getattr(scheduler, name, None)) for name in _LENGTHS),
        *((name, given.get(name)) for given in keywords for name in _KEYWORDS),
    ]
    for name, value in places:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            yield f"{type(scheduler).__name__}.{name}", value
    for part in getattr(scheduler, "_schedulers", ()):
        yield from _lengths(part)


def check_lengths(
    before: Sequence[tuple[str, float]],
    after: Sequence[tuple[str, float]],
    *,
    num_steps: float,
    ratio: Fraction,
    done: int = 0,
) -> None:
    """See that schedules have the length of the run that begins.

    Args:
        before: :func:`schedule_lengths` of the configured batch.
        after: The same with the schedulers made anew for the found one.
        num_steps: Optimizer steps of the run with the configured batch; infinite where that is not known.
        ratio: The found effective batch by the configured one.
        done: Steps of the configured batch that were made before.

    Raises:
        TuningError: One is still as long as the run was.
    """
    if not math.isfinite(num_steps):
        return
    num_after = scaled_steps(int(num_steps), ratio, done)
    if abs(num_after - num_steps) <= _ABOUT * num_steps:
        return
    for name, length in after:
        if (name, length) in before and abs(length - num_steps) <= _ABOUT * num_steps:
            raise TuningError(
                f"{name} is {length:g} steps, the length of the run with the configured batch size, and with the found"
                f" one it has {num_after:g}: read self.trainer.estimated_stepping_batches in configure_optimizers(),"
                " not before, so that the schedule ends with the run"
            )
