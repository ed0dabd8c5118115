"""Train a small convolutional network on handwritten digits with Lightning, within a memory budget.

Usage: python -m examples.lightning.train --budget 8MiB

The model and the data are ordinary Lightning code; `strategy=` is all that changes.
"""

from __future__ import annotations

import argparse
import itertools

import lightning.pytorch as pl
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_offload


class Digits(pl.LightningDataModule):
    """The 1797 images of 8x8 pixels that come with scikit-learn."""

    def __init__(self, batch_size: int = 128) -> None:
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        digits = load_digits()
        images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
        data = TensorDataset(images, torch.tensor(digits.target))
        self.train_data, self.val_data = torch.utils.data.random_split(
            data, [0.8, 0.2], torch.Generator().manual_seed(0)
        )

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train_data, self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val_data, self.batch_size)


class Classifier(pl.LightningModule):
    """Six convolutions with BatchNorm and a linear layer."""

    def __init__(self, width: int = 32, lr: float = 3e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        widths = [1, width, width, width, 2 * width, 2 * width, 2 * width]
        layers: list[nn.Module] = []
        for n_in, n_out in itertools.pairwise(widths):
            stride = 2 if n_in != n_out and n_in != 1 else 1
            layers += [nn.Conv2d(n_in, n_out, 3, stride, 1, bias=False), nn.BatchNorm2d(n_out), nn.ReLU()]
        self.net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 10))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        images, labels = batch
        loss = nn.functional.cross_entropy(self.net(images), labels)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        images, labels = batch
        self.log("val_accuracy", (self.net(images).argmax(1) == labels).float().mean(), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", default="8MiB", help="peak memory of a training step")
    parser.add_argument("--epochs", type=int, default=5)
    args = parser.parse_args()

    pl.seed_everything(0)
    strategy = lightning_offload.OffloadStrategy(budget=args.budget)
    trainer = pl.Trainer(
        strategy=strategy,
        callbacks=[lightning_offload.OffloadMonitor()],
        max_epochs=args.epochs,
        accelerator="auto",
        devices=1,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(Classifier(), Digits())
    print(f"validation accuracy: {trainer.callback_metrics['val_accuracy']:.3f}")
    print(strategy.memory.report())


if __name__ == "__main__":
    main()
