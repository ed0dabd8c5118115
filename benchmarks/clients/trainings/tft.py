"""The Temporal Fusion Transformer of pytorch-forecasting."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import pandas as pd
from lightning.pytorch import Callback
from pytorch_forecasting import QuantileLoss, TemporalFusionTransformer, TimeSeriesDataSet
from torch import nn

from benchmarks.clients.trainings import lightnings


def waves(num_hours: int) -> pd.DataFrame:
    """Twelve series with noise."""
    hours = np.arange(num_hours)
    noise = 0.1 * np.random.default_rng(0).normal(size=12 * len(hours))
    return pd.DataFrame(
        {
            "time": np.tile(hours, 12),
            "series": np.repeat([f"s{number}" for number in range(12)], len(hours)),
            "value": np.sin(np.tile(hours, 12) / 12) + noise,
        }
    )


def train(budget: str | None, folder: Path, callbacks: Sequence[Callback] = (), times: int = 1) -> nn.Module:
    """Train on waves of several lengths."""
    data = TimeSeriesDataSet(
        waves(120 * times),
        time_idx="time",
        target="value",
        group_ids=["series"],
        min_encoder_length=12,
        max_encoder_length=24,
        max_prediction_length=6,
        static_categoricals=["series"],
        time_varying_known_reals=["time"],
        time_varying_unknown_reals=["value"],
    )
    model = TemporalFusionTransformer.from_dataset(
        data,
        hidden_size=16,
        attention_head_size=2,
        hidden_continuous_size=8,
        dropout=0.1,
        loss=QuantileLoss(),
        learning_rate=1e-3,
    )
    arguments = lightnings.trainer_arguments(budget, callbacks)
    trainer = pl.Trainer(max_steps=times * lightnings.NUM_STEPS, gradient_clip_val=0.1, **arguments)
    trainer.fit(model, data.to_dataloader(train=True, batch_size=32, num_workers=0))
    return model
