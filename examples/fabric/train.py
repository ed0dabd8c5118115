"""Train a small convolutional network on handwritten digits with Lightning Fabric, within a memory budget.

Usage: python -m examples.fabric.train --budget 8MiB

The loop is an ordinary one; `strategy=` is all that changes.
"""

from __future__ import annotations

import argparse

import torch
from lightning.fabric import Fabric
from rich import print
from torch import nn

from examples.pytorch.train import digits, network
from lightning_offload.fabric import OffloadStrategy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", default="8MiB", help="peak memory of a training step")
    parser.add_argument("--epochs", type=int, default=5)
    args = parser.parse_args()

    fabric = Fabric(accelerator="auto", devices=1, strategy=OffloadStrategy(budget=args.budget))
    fabric.seed_everything(0, verbose=False)
    model = network()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
    train, test = fabric.setup_dataloaders(*digits(batch_size=128))

    for epoch in range(args.epochs):
        for images, labels in train:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            fabric.backward(loss)
            optimizer.step()
        fabric.print(f"epoch {epoch}: loss {loss.item():.4f}")

    model.eval()
    with torch.no_grad():
        hits = [(model(images).argmax(1) == labels).float() for images, labels in test]
    fabric.print(f"test accuracy: {torch.cat(hits).mean():.3f}")
    print(fabric.strategy.memory.report())


if __name__ == "__main__":
    main()
