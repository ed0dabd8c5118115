"""N-HiTS of pytorch-forecasting."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import lightning.pytorch as pl
from lightning.pytorch import Callback
from pytorch_forecasting import MAE, NHiTS, TimeSeriesDataSet
from torch import nn

from benchmarks.clients.trainings import lightnings
from benchmarks.clients.trainings.tft import waves


def train(budget: str | None, folder: Path, callbacks: Sequence[Callback] = (), times: int = 1) -> nn.Module:
    """Train on waves of one length."""
    data = TimeSeriesDataSet(
        waves(120 * times),
        time_idx="time",
        target="value",
        group_ids=["series"],
        max_encoder_length=24,
        max_prediction_length=6,
        time_varying_unknown_reals=["value"],
    )
    model = NHiTS.from_dataset(data, hidden_size=64, dropout=0.1, loss=MAE(), learning_rate=1e-3)
    arguments = lightnings.trainer_arguments(budget, callbacks)
    trainer = pl.Trainer(max_steps=times * lightnings.NUM_STEPS, gradient_clip_val=1.0, **arguments)
    trainer.fit(model, data.to_dataloader(train=True, batch_size=32, num_workers=0))
    return model
