"""How many micro-batches a Trainer accumulates for an optimizer step, wherever that is configured.

A `GradientAccumulationScheduler` leaves the Trainer's own number at 1 until an epoch begins, and then sets it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

__all__ = ["accumulating", "accumulation_of", "accumulation_schedule"]


def accumulation_schedule(trainer: Any) -> Any | None:
    """The callback that changes the accumulation from epoch to epoch; None where there is none."""
    return next((each for each in trainer.callbacks if hasattr(each, "get_accumulate_grad_batches")), None)


def accumulation_of(trainer: Any) -> int:
    """Micro-batches of an optimizer step in the epoch that is under way, or is to begin."""
    schedule = accumulation_schedule(trainer)
    number = trainer.accumulate_grad_batches
    return int(number if schedule is None else schedule.get_accumulate_grad_batches(trainer.current_epoch))


@contextlib.contextmanager
def accumulating(trainer: Any, number: int) -> Iterator[None]:
    """Inside, the Trainer accumulates so many micro-batches."""
    before, trainer.accumulate_grad_batches = trainer.accumulate_grad_batches, number
    try:
        yield
    finally:
        trainer.accumulate_grad_batches = before
