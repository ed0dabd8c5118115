"""The Lightning callback that measures a run: its losses, live bytes of some steps, and the state it comes to.

Counting ends before the optimizer steps, since a budget is about forward and backward. It slows a step down, so no step
is both counted and timed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch as L
import torch
from torch import Tensor

from examples.demo.state import save_state
from examples.demo.tracker import CudaPeak, LiveStorageTracker, peak_tracker

if TYPE_CHECKING:
    from lightning_offload.plugins.report import Report


class Measurement(L.Callback):
    """Measures the steps of one fit.

    Args:
        tracked_steps: Steps, counted from 0, whose live bytes are counted.
        num_steps: Steps after which the state is saved.
        state_path: Where losses, weights, statistics, optimizer and random state are saved then; None for nowhere.
        advance: Called after every step.

    Attributes:
        losses: The loss of every step.
        peak_bytes: Most bytes alive in a tracked step; 0 if there was none.
        report: The memory plugin's own account, if the strategy has one.
    """

    def __init__(
        self, tracked_steps: range, *, num_steps: int, state_path: Path | None, advance: Callable[[], None]
    ) -> None:
        self.losses: list[Tensor] = []
        self.peak_bytes = 0
        self.report: Report | None = None
        self._tracked_steps = tracked_steps
        self._num_steps = num_steps
        self._state_path = state_path
        self._advance = advance
        self._tracking = contextlib.ExitStack()
        self._tracker: LiveStorageTracker | CudaPeak | None = None

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Start counting."""
        if trainer.global_step in self._tracked_steps:
            self._tracker = self._tracking.enter_context(peak_tracker(pl_module.device))
            self._tracker.add([*persistent_tensors(trainer, pl_module), *batch])

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Stop counting: forward and backward are over."""
        self._tracking.close()
        if self._tracker is not None:
            self.peak_bytes = max(self.peak_bytes, self._tracker.peak_bytes)
            self._tracker = None

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Keep the loss, and save the state after the last step that counts."""
        self.losses.append(outputs["loss"].detach().clone())
        if self._state_path is not None and len(self.losses) == self._num_steps:
            save_state(self._state_path, self.losses, pl_module, trainer.optimizers[0])
        self._advance()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Leave no dispatch mode behind when a step fails."""
        self._tracking.close()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Read the plugin's account while it is attached."""
        memory = getattr(trainer.strategy, "memory", None)
        if memory is not None:
            self.report = memory.report()


def persistent_tensors(trainer: L.Trainer, module: L.LightningModule) -> Iterator[Tensor]:
    """Yield what lives across steps: parameters, their gradients, buffers and optimizer state."""
    for parameter in module.parameters():
        yield parameter
        if parameter.grad is not None:
            yield parameter.grad
    yield from module.buffers()
    for optimizer in trainer.optimizers:
        for state in optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))
