"""How long a run is in optimizer steps, and when the batch changes: as many samples, so fewer or more steps.

`max_steps` and `min_steps` are given for the configured batch, and so is a `limit_train_batches` that is a number of
batches and not a share of them. Any other epoch has as many samples whatever the batch is. Schedules that count steps
are as long as the run when the model makes them anew; one that was made from a number that is older than the tuning is
found by its length, which is still the old one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from lightning_offload.callbacks.tuning.trainer_facts import accumulation_schedule
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
        self._before: dict[str, Any] = {}

    def scale(self, trainer: Any, ratio: Fraction, size_ratio: Fraction, done: int = 0) -> str:
        """Set the limits for another batch; tell what was changed, in a sentence without its full stop.

        Args:
            trainer: At the start of a fit.
            ratio: The new effective batch by the configured one.
            size_ratio: The new batch of a rank by the configured one.
            done: Steps that were made before.
        """
        told = []
        for name in _LIMITS:
            before = getattr(trainer.fit_loop.epoch_loop, name)
            if before is None or before == (after := scaled_steps(before, ratio, done)):
                continue
            self._set(trainer, name, after)
            told.append(f"{name} is {after}, which is as many samples as {before} steps of the configured batch")
        limit = trainer.limit_train_batches
        if is_number_of_batches(limit) and (scaled := scaled_steps(limit, size_ratio)) != limit:
            self._set(trainer, "limit_train_batches", scaled)
            told.append(f"limit_train_batches is {scaled}, which is as many samples as {limit} batches as configured")
        return "; ".join(told)

    def accumulate(self, trainer: Any, number: int) -> None:
        """Set how many micro-batches are accumulated."""
        if number != trainer.accumulate_grad_batches:
            self._set(trainer, "accumulate_grad_batches", number)

    def put_back(self, trainer: Any) -> None:
        """Set what the user gave."""
        for name, before in self._before.items():
            setattr(_holder_of(name, trainer), name, before)
        self._before.clear()

    def _set(self, trainer: Any, name: str, value: int) -> None:
        holder = _holder_of(name, trainer)
        self._before.setdefault(name, getattr(holder, name))
        setattr(holder, name, value)


def _holder_of(name: str, trainer: Any) -> Any:
    return trainer.fit_loop.epoch_loop if name in _LIMITS else trainer


def schedule_lengths(configs: Sequence[Any]) -> dict[str, float]:
    """The lengths, in steps, of the schedules that count optimizer steps: where each comes from, and how long it is.

    Args:
        configs: Lightning's, one for each scheduler.
    """
    found: dict[str, float] = {}
    for number, config in enumerate(configs):
        if config.interval == "step":
            found.update(_lengths(config.scheduler, f"{number} "))
    return found


def _lengths(scheduler: Any, place: str) -> dict[str, float]:
    where = f"{place}{type(scheduler).__name__}"
    found: dict[str, float] = {}
    for name in _LENGTHS:
        value = getattr(scheduler, name, None)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            found[f"{where}.{name}"] = value
    for index, function in enumerate(getattr(scheduler, "lr_lambdas", ())):
        keywords = getattr(function, "keywords", None) or {}
        found.update({f"{where}.{key}[{index}]": keywords[key] for key in _KEYWORDS if key in keywords})
    for index, part in enumerate(getattr(scheduler, "_schedulers", ())):
        found.update(_lengths(part, f"{where}[{index}] "))
    return found


def check_lengths(
    before: dict[str, float], after: dict[str, float], *, num_steps: float, ratio: Fraction, done: int = 0
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
    for where, length in after.items():
        if before.get(where) == length and abs(length - num_steps) <= _ABOUT * num_steps:
            name = where.rpartition(" ")[2].partition("[")[0]
            raise TuningError(
                f"{name} is {length:g} steps, the length of the run with the configured batch size, and with the found"
                f" one it has {num_after:g}: read self.trainer.estimated_stepping_batches in configure_optimizers(),"
                " not before, so that the schedule ends with the run"
            )
