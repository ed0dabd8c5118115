"""Tunes twice in a process of its own, with the heap set aside and without, and prints what both saw as JSON."""

from __future__ import annotations

import contextlib
import gc
import json
import sys
from typing import Any

import lightning.pytorch as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from examples.demo.training import quiet_lightning
from lightning_offload import EfficientBatchSizeFinder, OffloadStrategy
from lightning_offload.callbacks.tuning import session

frozen: list[int] = []
"""Objects that were frozen as each step began; no attribute of the model, which a tuning would put back."""


class Zeros(Dataset[Tensor]):
    """Samples that are made when they are asked for: on a CPU a tensor of all would be memory of the device."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> Tensor:
        return torch.zeros(32)


class Net(L.LightningModule):
    """Layers that save more the larger the batch is."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.Tanh())))
        self.batch_size = 8

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        frozen.append(gc.get_freeze_count())

    def training_step(self, batch: Tensor) -> Tensor:
        loss: Tensor = self.layers(batch).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), 1e-3)

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(Zeros(), batch_size=self.batch_size)


def tune() -> dict[str, Any]:
    """Peaks by size, and what was frozen in trials and after them."""
    torch.manual_seed(0)
    finder = EfficientBatchSizeFinder(
        objective="throughput", max_seconds=60.0, lr_scaling="none", advanced={"max_trials": 8, "min_confidence": 0.0}
    )
    trainer = L.Trainer(
        accelerator="cpu", max_steps=2, callbacks=[finder], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, strategy=OffloadStrategy(budget="1GiB"),
    )  # fmt: skip
    frozen.clear()
    with quiet_lightning():
        trainer.fit(Net())
    assert finder.result is not None
    peaks = {trial.batch_size: trial.peak_bytes for trial in finder.result.trials if trial.peak_bytes is not None}
    return {"peaks": peaks, "trials": frozen[:-1], "run": frozen[-1], "after": gc.get_freeze_count()}


if __name__ == "__main__":
    found = [tune()]
    session.heap_set_aside = contextlib.nullcontext  # type: ignore[assignment]
    sys.stdout.write(json.dumps([*found, tune()]))
