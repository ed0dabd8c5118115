"""What is training state among a user's objects, and the random state, is put back; training then repeats itself."""

from __future__ import annotations

import random
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_offload import MemoryPlugin
from lightning_offload.tuning.snapshot import take_snapshot


class Net(nn.Module):
    """Batch norm, dropout, a buffer that is not saved, and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
        self.register_buffer("mean", torch.zeros(8), persistent=False)
        self.num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        self.mean += x.mean(0)
        return self.net(x)


def setup() -> dict[str, Any]:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=100),
        "scaler": torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2),
        "loader": DataLoader(
            TensorDataset(torch.randn(32, 8)), 8, shuffle=True, generator=torch.Generator().manual_seed(4)
        ),
    }


def train(parts: dict[str, Any], num_epochs: int = 2) -> list[bytes]:
    model, optimizer, scaler = parts["model"], parts["optimizer"], parts["scaler"]
    seen = []
    for _ in range(num_epochs):
        for (x,) in parts["loader"]:
            x = x * random.random() + float(np.random.rand())  # noqa: NPY002
            loss = model(x).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            parts["scheduler"].step()
            seen += [loss.detach(), *(p.detach().clone() for p in model.parameters()), model.mean.clone()]
    seen += [torch.tensor(float(model.num_calls)), torch.tensor(scaler.get_scale())]
    return [tensor.numpy().tobytes() for tensor in seen]


def test_restored() -> None:
    """Training after a restore repeats itself: models, optimizers, schedulers, scalers, loaders, random numbers."""
    parts = setup()
    train(parts)  # in the middle of things, gradients and state there
    restore = take_snapshot([[parts["model"]], parts])
    first = train(parts)
    for _ in range(2):
        restore()
        assert train(parts) == first
    assert train(parts) != first


def test_restored_to_the_beginning() -> None:
    """State that an optimizer makes lazily, gradients, attributes and hooks that came later are gone."""
    parts = setup()
    model, optimizer = parts["model"], parts["optimizer"]
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    restore = take_snapshot(parts.values())
    train(parts)
    model.eval()
    model.added = 1
    model.register_forward_hook(lambda *_: None)
    model.forward = lambda x: x
    restore()
    assert optimizer.state_dict()["state"] == {}
    assert [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups] == groups
    assert all(p.grad is None for p in model.parameters())
    assert model.training
    assert not hasattr(model, "added")
    assert not model._forward_hooks
    assert "forward" not in vars(model)


def test_scaler_cut_short() -> None:
    """A gradient scaler that was interrupted between unscale and update can be used again."""
    parts = setup()
    restore = take_snapshot(parts.values())
    parts["scaler"].scale(parts["model"](torch.ones(4, 8)).sum()).backward()
    parts["scaler"].unscale_(parts["optimizer"])
    restore()
    parts["scaler"].scale(parts["model"](torch.ones(4, 8)).sum()).backward()
    parts["scaler"].unscale_(parts["optimizer"])


def test_plans_stay() -> None:
    """A memory plugin is left as it is: its plans are not training state."""
    memory = MemoryPlugin("1GiB")
    memory.load_state_dict = None  # type: ignore[assignment, method-assign]  # would fail if it were called
    take_snapshot([memory, {"memory": memory}])()


class Native:
    """Keeps its state where no attribute shows it."""

    __slots__ = ()
    state: ClassVar[list[int]] = [1]

    def state_dict(self) -> dict[str, Any]:
        return {"state": list(self.state)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state[:] = state["state"]


def test_state_that_only_the_object_can_tell() -> None:
    """It is asked for, and given back."""
    native = Native()
    restore = take_snapshot([native])
    native.state[0] = 2
    restore()
    assert native.state == [1]
