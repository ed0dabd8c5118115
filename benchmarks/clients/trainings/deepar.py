"""DeepAR of GluonTS."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from gluonts.dataset.common import ListDataset
from gluonts.torch import DeepAREstimator
from lightning.pytorch import Callback
from torch import nn

from benchmarks.clients.trainings import lightnings


def train(budget: str | None, folder: Path, callbacks: Sequence[Callback] = (), times: int = 1) -> nn.Module:
    """Train on waves with noise."""
    hours, noise = np.arange(400), np.random.default_rng(0)
    series = [
        {
            "start": pd.Period("2024-01-01", freq="h"),
            "target": np.sin(hours / 24 * 2 * np.pi + phase) + 0.1 * noise.normal(size=len(hours)),
        }
        for phase in np.linspace(0, 6, 20)
    ]
    arguments = {"max_epochs": 2, "default_root_dir": str(folder), **lightnings.trainer_arguments(budget, callbacks)}
    arguments.pop("enable_checkpointing")  # it has a checkpoint of its own
    estimator = DeepAREstimator(
        freq="h",
        prediction_length=24,
        context_length=48,
        hidden_size=40,
        batch_size=32,
        num_batches_per_epoch=20 * times,
        trainer_kwargs=arguments,
    )
    output = estimator.train_model(ListDataset(series, freq="h"))
    return output.trained_net
