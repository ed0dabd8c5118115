"""A pilot: a few real optimizer steps on batches that are all different, which show how noisy gradients are.

Trials cannot: they repeat one batch. Each step of a pilot accumulates at least four micro-batches of the configured
size, whose gradients are independent; so batch norm is as it is in the training. With one rank each micro-gradient is
what a backward adds to the gradients, with several it is each rank's first, before they are reduced. Squares are taken
after a backward: before gradients are clipped, and divided by the GradScaler's scale. The first half of the steps is
left out, since at initialisation the noise scale says nothing of the training.

Everything is put back afterwards. The rate is the configured one, so a pilot that accumulates more micro-batches than
the run does takes larger steps in samples, not in parameters.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from lightning_offload.callbacks.tuning.coupling import is_batch_norm_shared, sharding_of
from lightning_offload.tuning.noise_scale import GradientSquares

__all__ = ["GradientWatch", "counted", "why_no_noise_scale"]


def why_no_noise_scale(trainer: Any, module: Any) -> str:
    """Why a pilot cannot measure the noise scale of a run; empty where it can."""
    if not module.automatic_optimization:
        return "with manual optimization its gradients cannot be told apart"
    if len(trainer.optimizers) != 1:
        return f"there are {len(trainer.optimizers)} optimizers"
    if name := sharding_of(trainer):
        return f"{name} shards the gradients"
    if is_batch_norm_shared(trainer, module):
        return "SyncBatchNorm ties the ranks' gradients together"
    return ""


def counted(steps: list[GradientSquares]) -> list[GradientSquares]:
    """The steps of a pilot that count: its second half."""
    return steps[len(steps) // 2 :]


class GradientWatch:
    """Takes the squared norms of micro-gradients while a model is trained by Lightning.

    Args:
        trainer: Its precision may have a GradScaler.
        module: The model.
        num_micro: Micro-batches of an optimizer step.
        micro_size: Samples of one, on this rank.
        num_ranks: Ranks that train together.
    """

    def __init__(self, trainer: Any, module: Any, *, num_micro: int, micro_size: int, num_ranks: int) -> None:
        self.steps: list[GradientSquares] = []
        self._trainer, self._module = trainer, module
        self._num_micro, self._micro_size, self._num_ranks = num_micro, micro_size, num_ranks
        self._squares: list[float] = []
        self._before: list[Tensor] = []

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Training takes place inside."""
        own: Callable[[], None] = self._module.on_after_backward

        def after_backward() -> None:
            own()
            self._note()

        object.__setattr__(self._module, "on_after_backward", after_backward)
        try:
            yield
        finally:
            vars(self._module).pop("on_after_backward", None)
            self._before.clear()

    @torch.no_grad()
    def _note(self) -> None:
        gradients = [each.grad.detach() for each in self._module.parameters() if each.grad is not None]
        is_last = len(self._squares) == self._num_micro - 1
        if self._num_ranks == 1:
            self._squares.append(self._added(gradients))
            self._before = [] if is_last else [each.clone() for each in gradients]
        else:  # the last ones are reduced, so they are no rank's own any more
            self._squares.append(_square(gradients) if not self._squares else 0.0)
        if is_last:
            self._end(_square(gradients))

    def _added(self, gradients: list[Tensor]) -> float:
        """The square of what the last backward added."""
        if not self._squares:
            return _square(gradients)
        if len(self._before) != len(gradients):  # parameters that are not used by every batch
            return math.inf
        return _square([after - before for after, before in zip(gradients, self._before, strict=True)])

    def _end(self, sum_square: float) -> None:
        scale = self._scale() ** 2
        squares = self._squares if self._num_ranks == 1 else self._squares[:1]
        # each loss was divided by their number
        micro = self._num_micro**2 * sum(squares) / len(squares)
        self._squares = []
        self.steps.append(
            GradientSquares(
                micro=micro / scale,
                mean=sum_square / scale,
                num_micro=self._num_micro * self._num_ranks,
                micro_size=self._micro_size,
            )
        )

    def _scale(self) -> float:
        scaler = getattr(self._trainer.precision_plugin, "scaler", None)
        return float(scaler.get_scale()) if scaler is not None else 1.0


def _square(tensors: list[Tensor]) -> float:
    if not tensors:
        return 0.0
    return float(torch.stack([each.double().pow(2).sum() for each in map(_dense, tensors)]).sum())


def _dense(tensor: Tensor) -> Tensor:
    return tensor.coalesce().values() if tensor.is_sparse else tensor
