"""A small network with batch norm and dropout, its data, and the state that training leaves."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

NUM_STEPS = 8


class Net(nn.Module):
    """Blocks of linear, batch norm, GELU and dropout."""

    def __init__(self, width: int = 32, depth: int = 3) -> None:
        super().__init__()
        block = lambda: nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.GELU(), nn.Dropout(0.2))  # noqa: E731
        self.blocks = nn.ModuleList(block() for _ in range(depth))
        self.head = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def net(seed: int = 1) -> Net:
    """A fresh network."""
    torch.manual_seed(seed)
    return Net()


def rows(num_batches: int = NUM_STEPS, batch_size: int = 64, *, shuffle: bool = True) -> DataLoader[Any]:
    """Batches of 32 numbers with labels."""
    generator = torch.Generator().manual_seed(7)
    num_rows = num_batches * batch_size
    data = TensorDataset(
        torch.randn(num_rows, 32, generator=generator), torch.randint(0, 4, (num_rows,), generator=generator)
    )
    return DataLoader(data, batch_size, shuffle=shuffle)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, losses: list[Tensor]) -> dict[str, Tensor]:
    """Losses, parameters, gradients, buffers, optimizer state and random state, by name."""
    found = {f"loss {i}": loss.detach() for i, loss in enumerate(losses)}
    found.update({f"model {name}": value for name, value in model.state_dict().items()})
    found.update({f"grad {n}": p.grad for n, p in model.named_parameters() if p.grad is not None})
    for i, state in optimizer.state_dict()["state"].items():
        found.update({f"optimizer {i} {name}": torch.as_tensor(value) for name, value in state.items()})
    found["rng"] = torch.get_rng_state()
    return {name: value.clone() for name, value in found.items()}


def assert_same(ours: dict[str, Tensor], plain: dict[str, Tensor]) -> None:
    """Fail with the names of what differs in a bit."""
    assert ours.keys() == plain.keys()
    assert [name for name in plain if _bytes(ours[name]) != _bytes(plain[name])] == []


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes()
