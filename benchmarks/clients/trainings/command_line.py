"""A project of LightningCLI, with an optimizer from its command line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch import Callback
from lightning.pytorch.cli import LightningCLI
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from benchmarks.clients.trainings import lightnings


class Classifier(pl.LightningModule):
    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, 10)
        )

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        inputs, labels = batch
        return nn.functional.cross_entropy(self.layers(inputs), labels)


class Samples(pl.LightningDataModule):
    def __init__(self, num_samples: int, batch_size: int = 8) -> None:
        super().__init__()
        self.save_hyperparameters()

    @override
    def setup(self, stage: str) -> None:
        inputs = torch.randn(self.hparams.num_samples, 64)
        self.samples = TensorDataset(inputs, inputs[:, :10].argmax(dim=1))

    @override
    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.samples, batch_size=self.hparams.batch_size, shuffle=True)


def train(budget: str | None, folder: Path, callbacks: Sequence[Callback] = (), times: int = 1) -> nn.Module:
    """Train by the command line."""
    size = [f"--data.num_samples={640 * times}", "--data.batch_size=16", "--model.width=1024"]
    rate = ["--optimizer=torch.optim.AdamW", "--optimizer.lr=0.001"]
    client = LightningCLI(
        Classifier,
        Samples,
        args=["fit", *size, *rate, "--trainer.max_epochs=2", f"--trainer.default_root_dir={folder}"],
        trainer_defaults=lightnings.trainer_arguments(budget, callbacks),
        seed_everything_default=False,
    )
    return client.model
