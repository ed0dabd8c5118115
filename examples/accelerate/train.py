"""Train a small convolutional network on handwritten digits with Accelerate, within a memory budget.

Usage: python -m examples.accelerate.train --budget 8MiB
       python -m examples.accelerate.train --budget 8MiB --tune

The loop is an ordinary one; `prepare_offload` after `accelerator.prepare` is all that is added. With --tune the batch
size is found first: `find_efficient_batch_size` stands where accelerate's `find_executable_batch_size` would.
"""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator
from rich import print
from torch import nn

from examples.pytorch.train import digits, network
from lightning_offload.accelerate import find_efficient_batch_size, prepare_offload


def train(batch_size: int, accelerator: Accelerator, budget: str, epochs: int) -> None:
    accelerator.free_memory()
    torch.manual_seed(0)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer, train, test = accelerator.prepare(model, optimizer, *digits(batch_size))

    with prepare_offload(accelerator, model, budget=budget) as memory:
        for epoch in range(epochs):
            for images, labels in train:
                with accelerator.accumulate(model):
                    loss = nn.functional.cross_entropy(model(images), labels)
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
            accelerator.print(f"epoch {epoch}: loss {loss.item():.4f}")

    model.eval()
    with torch.no_grad():
        hits = [(model(images).argmax(1) == labels).float() for images, labels in test]
    accelerator.print(f"test accuracy: {torch.cat(hits).mean():.3f}")
    print(memory.report())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", default="8MiB", help="peak memory of a training step")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--tune", action="store_true", help="find the batch size")
    args = parser.parse_args()

    accelerator = Accelerator()
    if args.tune:
        tuned = find_efficient_batch_size(train, starting_batch_size=32, max_size=128, max_trials=8)
        tuned(accelerator, args.budget, args.epochs)
        for trial in tuned.result.trials:
            print(trial)
        print(f"batch size: {tuned.result.batch_size}")
    else:
        train(128, accelerator, args.budget, args.epochs)


if __name__ == "__main__":
    main()
