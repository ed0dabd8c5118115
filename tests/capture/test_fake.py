"""A fake step gives the graph of the real one, without memory or arithmetic."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_offload.graph import StepGraph
from tests.capture.recording import record


class Residual(nn.Module):
    """Convolution, norm, an in-place ReLU and an addition."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu_(self.norm(self.conv(x))) + x
        out: Tensor = self.head(y.mean((2, 3)))
        return out


NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4)), (8, 16)),
    "residual": (Residual, (2, 4, 6, 6)),
    "attention": (lambda: nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True), (2, 5, 16)),
}


def untimed(graph: StepGraph) -> StepGraph:
    """A graph without what is measured: times and workspaces."""
    ops = (dataclasses.replace(op, seconds=0.0, workspace_bytes=0) for op in graph.ops)
    return dataclasses.replace(graph, ops=tuple(ops))


def recorded(name: str, *, fake: bool) -> StepGraph:
    """Record the first step of a net."""
    build, shape = NETS[name]
    net, x = build(), torch.randn(shape)
    return record(lambda: net(x).sum().backward(), net, fake=fake)


@pytest.mark.usefixtures("in_python")
@pytest.mark.parametrize("name", NETS)
def test_fake_graph_is_the_real_one(name: str) -> None:
    """Ops, storages, lifetimes, saves, unpacks and releases agree; times alone differ."""
    with FakeTensorMode():
        fake = recorded(name, fake=True)
    real = recorded(name, fake=False)
    assert fake.digest() == real.digest()
    assert untimed(fake) == untimed(real)
