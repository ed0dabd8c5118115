"""Whether a trial may run out of memory, and which sizes are safe where it may not.

A rank that runs out of memory leaves its step, and ranks that talk to it within theirs would wait for ever. Trials do
not reduce gradients, so under DDP that is only so where the model or the strategy has collectives of its own: then what
may not fit is predicted and not tried.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from lightning_offload.plugins.predictions import LinePredictor
from lightning_offload.tuning.trial import Prediction, Trial

__all__ = ["is_safe", "num_collectives", "reason_not_to_run_out"]

_SHARE = 0.9  # of the budget that a prediction may fill
_SHARDED = ("FSDPStrategy", "ModelParallelStrategy")


def reason_not_to_run_out(trainer: Any, module: Any, provoke_oom: bool | None) -> str:
    """Why no trial may run out of memory; empty where one may.

    Args:
        trainer: Its strategy is known.
        module: The model.
        provoke_oom: What the user says of it, if anything.
    """
    if provoke_oom is not None:
        return "" if provoke_oom else "provoke_oom=False"
    name = next((cls.__name__ for cls in type(trainer.strategy).__mro__ if cls.__name__ in _SHARDED), None)
    if name is not None:
        return f"{name} gathers parameters within a step"
    if trainer.world_size > 1 and any(isinstance(part, torch.nn.SyncBatchNorm) for part in module.modules()):
        return "SyncBatchNorm talks to other ranks within a step"
    return ""


def num_collectives() -> int:
    """How many collectives this process has begun in its groups; where it is another number later, there was one.

    Groups count them, so none is missed: not those of hooks between backward and the optimizer, nor compiled ones.
    """
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return 0
    from torch.distributed.distributed_c10d import _world

    return sum(map(_num_begun, list(_world.pg_map)))


def _num_begun(group: Any) -> int:
    try:
        return int(group._get_sequence_number_for_group())
    except RuntimeError:  # a backend that does not count
        return 0


def is_safe(
    batch_size: int,
    *,
    known_size: int,
    predict: Callable[[int], Prediction | None],
    trials: Sequence[Trial],
    budget_bytes: int | None,
    num_ranks: int,
) -> bool:
    """Whether a size will surely fit.

    Args:
        batch_size: The size.
        known_size: The largest that the user configured or that has run.
        predict: Predicts a size; the same on every rank.
        trials: Those so far; a line through their peaks is the prediction where there is no other.
        budget_bytes: The budget, None for no limit.
        num_ranks: Devices that train together.
    """
    if batch_size <= known_size or budget_bytes is None:
        return True
    prediction = predict(batch_size) or LinePredictor(trials, budget_bytes, num_ranks)(batch_size)
    needed = prediction.floor_bytes if prediction.floor_bytes is not None else prediction.peak_bytes
    return prediction.is_feasible and needed is not None and needed <= _SHARE * budget_bytes
