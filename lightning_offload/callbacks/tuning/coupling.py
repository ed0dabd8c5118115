"""What ties the ranks of a run together within a step: trials that may fail alone, and gradients that are one rank's.

A rank that runs out of memory amid a collective leaves the others waiting for ever, and gradients of samples that
others have seen, too, are no independent ones.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["is_batch_norm_shared", "sharding_of"]

_SHARDED = ("FSDPStrategy", "ModelParallelStrategy")


def sharding_of(trainer: Any) -> str:
    """The name of a strategy that shards parameters and gathers them within a step; "" where none does."""
    return next((cls.__name__ for cls in type(trainer.strategy).__mro__ if cls.__name__ in _SHARDED), "")


def is_batch_norm_shared(trainer: Any, module: Any) -> bool:
    """Whether ranks exchange statistics of their batches within a step."""
    return trainer.world_size > 1 and any(isinstance(part, torch.nn.SyncBatchNorm) for part in module.modules())
