"""Storages that a program empties after forward and fills again before backward, as sharded parameters are."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_offload import MemoryPlugin
from tests.fuzz.running import random_planner

SIDE = 64
NUM_STEPS = 12


def emptied(tensor: Tensor) -> None:
    tensor.untyped_storage().resize_(0)


def filled(tensor: Tensor, contents: Tensor) -> None:
    """Fill a tensor anew out of sight of autograd, which finds the version that it saved."""
    tensor.untyped_storage().resize_(contents.nbytes)
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(tensor):
        tensor.copy_(contents)


class Sharded(nn.Module):
    """A weight that is there in its layer's forward and backward alone."""

    def __init__(self) -> None:
        super().__init__()
        self.shard = nn.Parameter(torch.randn(SIDE, SIDE) / 8)
        self.full: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.full is None:
            self.full = torch.empty_like(self.shard).requires_grad_()
        full = self.full
        filled(full, self.shard)
        y = torch.sigmoid(x @ full.t())
        emptied(full)
        y.register_hook(lambda _: filled(full, self.shard))
        return y

    def reduce(self) -> None:
        """Hand the gradient over."""
        assert self.full is not None
        self.shard.grad, self.full.grad = self.full.grad, None
        emptied(self.full)


class Activation(nn.Module):
    """What it saves is emptied, and holds something else when it is read; from some step on, or in all of them."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.linear = nn.Linear(SIDE, SIDE)
        self.first = first
        self.index = 0

    def forward(self, x: Tensor) -> Tensor:
        y = torch.sigmoid(self.linear(x))
        z = y * y.exp()
        if self.index >= self.first:
            contents = 0.5 * y.detach()
            emptied(y)
            z.register_hook(lambda _: filled(y, contents))
        return z

    def reduce(self) -> None:
        self.index += 1


def trained(first: int, memory: MemoryPlugin | None) -> list[Tensor]:
    """Losses and gradients of a training."""
    torch.manual_seed(0)
    parts = [nn.Linear(SIDE, SIDE), Sharded(), Activation(first), Sharded(), nn.Tanh(), nn.Linear(SIDE, SIDE)]
    model = nn.Sequential(*parts)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for step in range(NUM_STEPS):
        x = torch.randn(128, SIDE, generator=torch.Generator().manual_seed(step))
        if memory is None:
            loss = functional.mse_loss(model(x), x)
            loss.backward()
        else:
            with memory.step(x):
                loss = functional.mse_loss(model(x), x)
                loss.backward()
        for part in parts:
            if isinstance(part, (Sharded, Activation)):
                part.reduce()
        seen += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        optimizer.step()
        optimizer.zero_grad()
    return seen


@pytest.mark.parametrize("first", [0, 8, NUM_STEPS], ids=["in-all-steps", "later", "parameters-alone"])
@pytest.mark.parametrize("policy", ["keep-all", "all-swap", "all-recompute"])
def test_what_is_emptied_meanwhile_is_read_as_it_then_is(policy: str, first: int) -> None:
    """Bit for bit as without the plugin: neither a copy nor a replay stands for it."""
    plain, before = trained(first, None), torch.UntypedStorage.resize_
    with MemoryPlugin(policy=policy, device="cpu") as memory:
        found = trained(first, memory)
        report = memory.report()
    assert len(found) == len(plain)
    assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))
    if policy == "all-swap":
        assert report.swapped_bytes
    assert torch.UntypedStorage.resize_ is before


@pytest.mark.parametrize("seed", [2, 4, 5, 7])
def test_replays_read_what_was_there_before(seed: int) -> None:
    """Under plans by dice, some of which recompute from what is emptied in later steps alone."""
    plain = trained(8, None)
    planned = mock.patch("lightning_offload.planning.planner.plan", random_planner(seed))
    with planned, MemoryPlugin(policy="all-swap", device="cpu") as memory:
        found = trained(8, memory)
    assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))
