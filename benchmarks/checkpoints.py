"""PyTorch's own checkpointing around the blocks of a model, switched on and off: what users have today.

Protocol: `checkpoints = BlockCheckpoints(blocks)`; steps inside `with checkpoints.on():` compute each block again in
backward, those inside `with checkpoints.selective():` all of it but products of matrices, convolutions and attention,
whose outputs are kept. Elsewhere the model is as it was, so that one model serves every contender.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

_aten = torch.ops.aten
KEPT_OPS = (
    _aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default, _aten.convolution.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default, _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default, _aten._scaled_dot_product_cudnn_attention.default,
)  # fmt: skip
"""What selective checkpointing keeps: the ops that take most of the time."""


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the blocks that one would put under checkpointing: residual blocks, stages of a VGG, or layers."""
    if isinstance(features := getattr(model, "features", None), nn.Sequential):
        return list(features)
    if isinstance(stages := getattr(model, "stages", None), nn.Sequential):
        return [block for stage in stages for block in stage.children()]
    return list(max((part for part in model.modules() if isinstance(part, nn.ModuleList)), key=lambda part: len(part)))


class BlockCheckpoints:
    """PyTorch's checkpointing around each block of a model, in force while it is on.

    Args:
        blocks: The blocks, whose `forward` is replaced.
    """

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        self._mode: Literal["off", "all", "selective"] = "off"
        for block in blocks:
            block.forward = self._switched(block.forward)

    def _switched(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if self._mode == "all":
                return checkpoint(forward, *args, use_reentrant=False, **kwargs)
            if self._mode == "selective":
                contexts = functools.partial(create_selective_checkpoint_contexts, _policy)
                return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)
            return forward(*args, **kwargs)

        return run

    def on(self) -> AbstractContextManager[None]:
        """Checkpoint the blocks."""
        return self._within("all")

    def selective(self) -> AbstractContextManager[None]:
        """Checkpoint the blocks, with the outputs of :data:`KEPT_OPS` kept."""
        return self._within("selective")

    @contextlib.contextmanager
    def _within(self, mode: Literal["all", "selective"]) -> Iterator[None]:
        self._mode = mode
        try:
            yield
        finally:
            self._mode = "off"


def _policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in KEPT_OPS else CheckpointPolicy.PREFER_RECOMPUTE
