"""The Temporal Fusion Transformer of pytorch-forecasting."""

from __future__ import annotations

from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import pandas as pd
from pytorch_forecasting import QuantileLoss, TemporalFusionTransformer, TimeSeriesDataSet
from torch import nn

from benchmarks.clients.trainings import lightnings


def train(budget: str | None, folder: Path) -> nn.Module:
    """Train on waves with noise, of several lengths."""
    hours = np.arange(120)
    noise = 0.1 * np.random.default_rng(0).normal(size=12 * len(hours))
    table = pd.DataFrame(
        {
            "time": np.tile(hours, 12),
            "series": np.repeat([f"s{number}" for number in range(12)], len(hours)),
            "value": np.sin(np.tile(hours, 12) / 12) + noise,
        }
    )
    data = TimeSeriesDataSet(
        table,
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
    trainer = pl.Trainer(max_steps=lightnings.NUM_STEPS, gradient_clip_val=0.1, **lightnings.trainer_arguments(budget))
    trainer.fit(model, data.to_dataloader(train=True, batch_size=32, num_workers=0))
    return model
