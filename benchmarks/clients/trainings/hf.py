"""What the trainings by the Hugging Face Trainer share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

from lightning_offload.transformers import OffloadCallback

NUM_STEPS = 40


def arguments(folder: Path, batch_size: int) -> dict[str, Any]:
    """What each such training is told, by keyword of the package's own class of arguments."""
    return {
        "output_dir": str(folder),
        "per_device_train_batch_size": batch_size,
        "max_steps": NUM_STEPS,
        "learning_rate": 1e-3,
        "logging_steps": 10,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
    }


def callbacks(budget: str | None) -> list[OffloadCallback]:
    """Ours, if there is a budget."""
    return [] if budget is None else [OffloadCallback(budget=budget)]


class Examples(Dataset[dict[str, Tensor]]):
    """Examples that are all there."""

    def __init__(self, **columns: Tensor) -> None:
        self._columns = columns

    def __len__(self) -> int:
        return len(next(iter(self._columns.values())))

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: column[index] for name, column in self._columns.items()}


def tokens(num_examples: int, length: int) -> Tensor:
    """Tokens that can be learned: each row counts on from its first."""
    return (torch.randint(0, 256, (num_examples, 1)) + torch.arange(length)) % 256


def train(model: nn.Module, examples: Examples, budget: str | None, folder: Path, batch_size: int) -> nn.Module:
    """Train by the Trainer, with nothing of its ways changed."""
    trainer = Trainer(
        model,
        TrainingArguments(**arguments(folder, batch_size)),
        train_dataset=examples,
        callbacks=callbacks(budget),
    )
    trainer.train()
    return model
