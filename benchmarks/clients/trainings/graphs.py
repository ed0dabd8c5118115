"""A GIN that classifies graphs, fed by PyTorch Geometric's LightningDataset."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch_geometric.data import Batch, Data
from torch_geometric.data.lightning import LightningDataset
from torch_geometric.nn import GIN, MLP, global_add_pool

from benchmarks.clients.trainings import lightnings


class Classifier(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = GIN(16, 64, 4, dropout=0.2, jk="cat")
        self.head = MLP([64, 64, 2], norm="batch_norm", dropout=0.2)

    def training_step(self, batch: Batch, batch_index: int) -> Tensor:
        nodes = self.network(batch.x, batch.edge_index)
        scores = self.head(global_add_pool(nodes, batch.batch, batch.num_graphs))
        return nn.functional.cross_entropy(scores, batch.y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def graphs(num_graphs: int) -> list[Data]:
    """Graphs of several sizes: each batch has a shape of its own."""
    found = []
    for _ in range(num_graphs):
        num_nodes = int(torch.randint(20, 30, ()))
        edges = torch.randint(0, num_nodes, (2, 4 * num_nodes))
        found.append(Data(torch.randn(num_nodes, 16), edges, y=torch.randint(0, 2, (1,)), num_nodes=num_nodes))
    return found


def train(budget: str | None, folder: Path, callbacks: Sequence[Callback] = (), times: int = 1) -> nn.Module:
    """Train by the Trainer that PyG's classes are for."""
    model = Classifier()
    data = LightningDataset(graphs(32 * 20 * times), batch_size=32)
    pl.Trainer(max_steps=times * lightnings.NUM_STEPS, **lightnings.trainer_arguments(budget, callbacks)).fit(
        model, data
    )
    return model
