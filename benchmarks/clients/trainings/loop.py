"""A loop in plain PyTorch, which tries the harness."""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch
from torch import nn

from lightning_offload import MemoryPlugin

_NUM_STEPS = 12


def train(budget: str | None, folder: Path) -> nn.Module:
    """Train a few layers."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(6)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    memory = None if budget is None else MemoryPlugin(budget, module=model)
    with contextlib.nullcontext() if memory is None else memory:
        for _ in range(_NUM_STEPS):
            batch = torch.randn(512, 64)
            optimizer.zero_grad()
            with contextlib.nullcontext() if memory is None else memory.step(batch):
                model(batch).square().mean().backward()
            optimizer.step()
    return model
