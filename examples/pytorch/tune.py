"""Find the batch size that pays in plain PyTorch, within a memory budget, and train with it.

Usage: python -m examples.pytorch.tune --budget 8MiB

The training function takes the batch size first and is an ordinary one otherwise; the decorator is all that is added.
It calls the function for a few steps at several sizes, then once for real.
"""

from __future__ import annotations

import argparse

import torch
from rich import print
from rich.table import Table
from torch import nn

import lightning_offload
from examples.pytorch.train import digits, network
from lightning_offload.tuning.function import find_efficient_batch_size


@find_efficient_batch_size(starting_batch_size=32, max_size=128, max_trials=8)
def train(batch_size: int, budget: str, epochs: int) -> None:
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = network().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3 * batch_size / 128)
    loader, _ = digits(batch_size)
    with lightning_offload.MemoryPlugin(budget=budget, device=device, module=model) as memory:
        for epoch in range(epochs):
            for images, labels in loader:
                images, labels = images.to(device), labels.to(device)
                optimizer.zero_grad()
                with memory.step(images, labels):
                    loss = nn.functional.cross_entropy(model(images), labels)
                    loss.backward()
                optimizer.step()
            print(f"epoch {epoch}: loss {loss.item():.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", default="8MiB", help="peak memory of a training step")
    parser.add_argument("--epochs", type=int, default=5)
    args = parser.parse_args()

    train(args.budget, args.epochs)
    table = Table("batch size", "samples per second", "reason")
    for trial in train.result.trials:
        speed = f"{trial.samples_per_second:.0f}" if trial.samples_per_second else ""
        table.add_row(str(trial.batch_size), speed, trial.reason)
    print(table)
    print(f"batch size: {train.result.batch_size}")


if __name__ == "__main__":
    main()
