"""Train a small convolutional network on handwritten digits in plain PyTorch, within a memory budget.

Usage: python -m examples.pytorch.train --budget 8MiB

The training loop is an ordinary one; `memory.step` around forward and backward is all that is added.
"""

from __future__ import annotations

import argparse
import itertools

import torch
from rich import print
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_offload


def digits(batch_size: int) -> tuple[DataLoader, DataLoader]:
    """The 1797 images of 8x8 pixels that come with scikit-learn, for training and for testing."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    dataset = TensorDataset(images, torch.tensor(data.target))
    train, test = torch.utils.data.random_split(dataset, [0.8, 0.2], torch.Generator().manual_seed(0))
    return DataLoader(train, batch_size, shuffle=True, drop_last=True), DataLoader(test, batch_size)


def network(width: int = 32) -> nn.Module:
    """Six convolutions with BatchNorm and a linear layer."""
    widths = [1, width, width, width, 2 * width, 2 * width, 2 * width]
    layers: list[nn.Module] = []
    for n_in, n_out in itertools.pairwise(widths):
        stride = 2 if n_in != n_out and n_in != 1 else 1
        layers += [nn.Conv2d(n_in, n_out, 3, stride, 1, bias=False), nn.BatchNorm2d(n_out), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 10))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", default="8MiB", help="peak memory of a training step")
    parser.add_argument("--epochs", type=int, default=5)
    args = parser.parse_args()

    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = network().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    train, test = digits(batch_size=128)

    with lightning_offload.MemoryPlugin(budget=args.budget, device=device, module=model) as memory:
        for epoch in range(args.epochs):
            for images, labels in train:
                images, labels = images.to(device), labels.to(device)
                optimizer.zero_grad()
                with memory.step(images, labels):
                    loss = nn.functional.cross_entropy(model(images), labels)
                    loss.backward()
                optimizer.step()
            print(f"epoch {epoch}: loss {loss.item():.4f}")

    model.eval()
    with torch.no_grad():
        hits = [(model(images.to(device)).argmax(1).cpu() == labels).float() for images, labels in test]
    print(f"test accuracy: {torch.cat(hits).mean():.3f}")
    print(memory.report())


if __name__ == "__main__":
    main()
