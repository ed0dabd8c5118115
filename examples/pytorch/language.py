"""Train a narrow GPT-2 with the whole vocabulary in plain PyTorch, its loss in chunks, within a memory budget.

Usage: python -m examples.pytorch.language --budget 160MiB
       python -m examples.pytorch.language --budget 160MiB --chunks 0

The logits of all tokens are by far the largest tensors of such a step. In chunks they never exist at once; with
`--chunks 0` they do, and the error says which budget that needs and what would lower it.
"""

from __future__ import annotations

import argparse

import torch
from rich import print
from torch import Tensor, nn
from torch.nn import functional as F

import lightning_offload
from examples.models import language


def plain_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """The same loss with all logits at once."""
    logits = model(input_ids=tokens).logits[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", default="160MiB", help="peak memory of a training step")
    parser.add_argument("--chunks", type=int, default=8, help="parts into which the rows are cut; 0 for all at once")
    parser.add_argument("--steps", type=int, default=12)
    args = parser.parse_args()

    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = language.gpt2(layers=2, width=64, heads=4).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    text = torch.randint(0, 50_257, (16,), device=device).repeat(64)  # a phrase over and over

    with lightning_offload.MemoryPlugin(budget=args.budget, device=device, module=model) as memory:
        for step in range(args.steps):
            tokens = torch.stack([text[start : start + 128] for start in torch.randint(0, 512, (4,))])
            optimizer.zero_grad()
            with memory.step(tokens):
                if args.chunks:
                    loss = language.chunked_loss(model, tokens, num_chunks=args.chunks)
                else:
                    loss = plain_loss(model, tokens)
                loss.backward()
            optimizer.step()
            print(f"step {step}: loss {loss.item():.4f}")
    print(memory.report())


if __name__ == "__main__":
    main()
