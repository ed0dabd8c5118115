"""Facts of a Trainer: what it accumulates, what it thaws, and what ties its ranks together; and how it is changed.

A `GradientAccumulationScheduler` leaves the Trainer's own number of micro-batches at 1 until an epoch begins, and then
sets it. A callback that unfreezes parts of a model (Lightning's `BaseFinetuning`) says so before the training begins;
a model that unfreezes its own says nothing. A rank that runs out of memory amid a collective leaves the others waiting
for ever, and gradients of samples that others have seen, too, are no independent ones.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

__all__ = [
    "accumulation_of",
    "accumulation_schedule",
    "is_batch_norm_shared",
    "replaced",
    "sharding_of",
    "unfreezes_later",
]

_SHARDED = ("FSDPStrategy", "ModelParallelStrategy")


def accumulation_schedule(trainer: Any) -> Any | None:
    """The callback that changes the accumulation from epoch to epoch; None where there is none."""
    return next((each for each in trainer.callbacks if hasattr(each, "get_accumulate_grad_batches")), None)


def accumulation_of(trainer: Any) -> int:
    """Micro-batches of an optimizer step in the epoch that is under way, or is to begin."""
    schedule = accumulation_schedule(trainer)
    number = trainer.accumulate_grad_batches
    return int(number if schedule is None else schedule.get_accumulate_grad_batches(trainer.current_epoch))


def unfreezes_later(trainer: Any) -> bool:
    """Whether a callback is going to unfreeze parameters."""
    return any(cls.__name__ == "BaseFinetuning" for callback in trainer.callbacks for cls in type(callback).__mro__)


def sharding_of(trainer: Any) -> str:
    """The name of a strategy that shards parameters and gathers them within a step; "" where none does."""
    return next((cls.__name__ for cls in type(trainer.strategy).__mro__ if cls.__name__ in _SHARDED), "")


def is_batch_norm_shared(trainer: Any, module: Any) -> bool:
    """Whether ranks exchange statistics of their batches within a step."""
    return trainer.world_size > 1 and any(isinstance(part, torch.nn.SyncBatchNorm) for part in module.modules())


@contextlib.contextmanager
def replaced(holder: Any, **values: Any) -> Iterator[None]:
    """Inside, attributes and methods of an object are others; what it did not have itself is taken away again."""
    own, kind = vars(holder), type(holder)
    before = {
        name: getattr(holder, name) for name in values if name in own or isinstance(getattr(kind, name, None), property)
    }
    try:
        for name, value in values.items():
            object.__setattr__(holder, name, value)  # not as a module sets what it takes for a part of it
        yield
    finally:
        for name in values:
            if name in before:
                object.__setattr__(holder, name, before[name])
            else:
                own.pop(name, None)
