"""A small net and its training steps, under a plugin or plainly."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lightning_offload import MemoryPlugin
from lightning_offload.plugins.report import Report

MIB = 1 << 20


class Net(nn.Module):
    """Eight blocks of linear and sigmoid; most of the memory of a step of 512 rows is saved results (12 MiB)."""

    def __init__(self, width: int = 256, depth: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Sigmoid()) for _ in range(depth))
        self.unused = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).sin()
        return x


def net(seed: int = 1) -> Net:
    """A fresh net."""
    torch.manual_seed(seed)
    return Net()


def rows(num: int = 512) -> Tensor:
    """A batch."""
    return torch.linspace(-1, 1, num * 256).view(num, 256)


def train_step(model: nn.Module, batch: Tensor, memory: MemoryPlugin | None = None) -> list[bytes]:
    """One step; the gradients as bytes."""
    with memory.step(batch) if memory is not None else contextlib.nullcontext():
        model(batch).square().mean().backward()
    found = [p.grad.numpy().tobytes() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return found


@contextlib.contextmanager
def attached(model: nn.Module, **keywords: Any) -> Iterator[MemoryPlugin]:
    """A plugin that serves a model."""
    memory = MemoryPlugin(module=model, **keywords)
    with memory:
        yield memory


def phases_of(memory: MemoryPlugin, model: nn.Module, batch: Tensor, num_steps: int) -> list[str]:
    """The phase of each of some steps."""
    found = []
    for _ in range(num_steps):
        train_step(model, batch, memory)
        found.append(memory.report().phase)
    return found


def report_of(model: nn.Module, batch: Tensor, *, num_steps: int = 5, **keywords: Any) -> Report:
    """The report after some steps."""
    with attached(model, **keywords) as memory:
        for _ in range(num_steps):
            train_step(model, batch, memory)
        return memory.report()


def middle_budget(model: nn.Module, batch: Tensor) -> int:
    """A budget half-way between the floor and the plain peak."""
    report = report_of(model, batch, policy="all-swap")
    assert report.floor_bytes is not None
    assert report.plain_peak_bytes is not None
    return (report.floor_bytes + report.plain_peak_bytes) // 2
