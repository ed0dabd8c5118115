"""A net on molecules, whose batches are of classes of their own, as chemprop has them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field
from pathlib import Path
from typing import NamedTuple

import lightning.pytorch as pl
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader
from typing_extensions import override

from benchmarks.clients.trainings import lightnings


class Molecule(NamedTuple):
    atoms: Tensor  # (number of atoms, features)
    bonds: Tensor  # (2, number of bonds)
    target: float


@dataclass
class Molecules:
    """All atoms and bonds of a batch."""

    molecules: InitVar[list[Molecule]]
    atoms: Tensor = field(init=False)
    bonds: Tensor = field(init=False)
    owners: Tensor = field(init=False)
    size: int = field(init=False)

    def __post_init__(self, molecules: list[Molecule]) -> None:
        counts = torch.tensor([len(molecule.atoms) for molecule in molecules])
        firsts = counts.cumsum(0) - counts
        self.atoms = torch.cat([molecule.atoms for molecule in molecules])
        self.bonds = torch.cat([m.bonds + first for m, first in zip(molecules, firsts, strict=True)], dim=1)
        self.owners = torch.repeat_interleave(torch.arange(len(molecules)), counts)
        self.size = len(molecules)

    def to(self, device: torch.device) -> None:
        """Move to a device, in place."""
        self.atoms, self.bonds, self.owners = (each.to(device) for each in (self.atoms, self.bonds, self.owners))


class Batch(NamedTuple):
    molecules: Molecules
    targets: Tensor
    weights: Tensor | None


def collate(molecules: list[Molecule]) -> Batch:
    return Batch(Molecules(molecules), torch.tensor([molecule.target for molecule in molecules]), None)


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.pass_on = nn.Linear(8, 64), nn.Linear(64, 64)
        self.head = nn.Sequential(nn.BatchNorm1d(64), nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1))

    @override
    def transfer_batch_to_device(self, batch: Batch, device: torch.device, dataloader_idx: int) -> Batch:
        batch.molecules.to(device)
        return Batch(batch.molecules, batch.targets.to(device), batch.weights)

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        molecules, (sources, ends) = batch.molecules, batch.molecules.bonds
        entered = hidden = self.enter(molecules.atoms).relu()
        for _ in range(3):
            hidden = (entered + self.pass_on(torch.zeros_like(hidden).index_add(0, ends, hidden[sources]))).relu()
        whole = hidden.new_zeros(molecules.size, 64).index_add(0, molecules.owners, hidden)
        return nn.functional.mse_loss(self.head(whole).squeeze(1), batch.targets)

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def some(num_molecules: int) -> list[Molecule]:
    """Molecules of several sizes."""
    found = []
    for _ in range(num_molecules):
        num_atoms = int(torch.randint(8, 20, ()))
        atoms = torch.randn(num_atoms, 8)
        found.append(Molecule(atoms, torch.randint(0, num_atoms, (2, 2 * num_atoms)), float(atoms.mean())))
    return found


def train(budget: str | None, folder: Path, callbacks: Sequence[Callback] = (), times: int = 1) -> nn.Module:
    """Train with a loader that has a collation of its own."""
    model, loader = Net(), DataLoader(some(640 * times), batch_size=16, shuffle=True, collate_fn=collate)
    pl.Trainer(max_epochs=2, **lightnings.trainer_arguments(budget, callbacks)).fit(model, loader)
    return model
