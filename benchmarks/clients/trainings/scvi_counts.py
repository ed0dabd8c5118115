"""The variational autoencoder of scvi-tools."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import scvi
from anndata import AnnData
from lightning.pytorch import Callback
from torch import nn

from benchmarks.clients.trainings import lightnings


def train(budget: str | None, folder: Path, callbacks: Sequence[Callback] = (), times: int = 1) -> nn.Module:
    """Train on counts of genes, in two batches of cells."""
    scvi.settings.seed = 7  # it splits cells by a random state of its own
    rng = np.random.default_rng(0)
    counts = rng.poisson(1.0, (256 * 10 * times, 400)).astype(np.float32)
    cells = AnnData(counts, obs={"batch": rng.choice(["a", "b"], len(counts))})
    scvi.model.SCVI.setup_anndata(cells, batch_key="batch")
    model = scvi.model.SCVI(cells, n_layers=2, n_hidden=128)
    model.train(max_epochs=4, batch_size=256, train_size=1.0, **lightnings.trainer_arguments(budget, callbacks))
    return model.module
