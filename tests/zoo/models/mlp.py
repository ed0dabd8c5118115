"""A residual MLP, whose weights and activations can be given any proportion, and variations of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class ResidualBlock(nn.Module):
    """A normalised two-layer MLP, added to its input.

    Args:
        width: Features of the input and of the output.
        hidden: Features between the layers.
        dropout: Share of the output that is dropped.
    """

    def __init__(self, width: int, hidden: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.first = nn.Linear(width, hidden)
        self.second = nn.Linear(hidden, width)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        """Return the input plus what the block makes of it."""
        inner = self.second(functional.gelu(self.first(self.norm(x))))
        return x + functional.dropout(inner, self.dropout, self.training)


class ResidualMLP(nn.Module):
    """A stack of residual blocks.

    Args:
        width: Features of the input and of the output.
        hidden: Features inside each block.
        depth: The number of blocks.
        dropout: Share of each block's output that is dropped.
        drop_layer: Share of the blocks that are skipped in a step (LayerDrop; Fan et al., 2020).
    """

    def __init__(self, width: int, hidden: int, depth: int, *, dropout: float = 0.0, drop_layer: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([ResidualBlock(width, hidden, dropout) for _ in range(depth)])
        self.drop_layer = drop_layer

    def forward(self, x: Tensor) -> Tensor:
        """Return the features of a batch of rows."""
        for block in self.blocks:
            if not self.drop_layer or torch.rand(()).item() >= self.drop_layer:
                x = block(x)
        return x


_WAVE = """
def wave(x: Tensor, scale: Tensor) -> Tensor:
    wave = torch.sin(x) * torch.exp(-x * x) * scale
    return torch.tanh(wave + x) * torch.sigmoid(x)
"""


class PartlyScripted(nn.Module):
    """Linear layers with a scripted function between them: its forward and backward are run by the JIT.

    Each network compiles its own: what the JIT has learned of a function decides how it runs it.
    """

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(depth)])
        self.scale = nn.Parameter(torch.ones(width))
        self.wave: Any = torch.jit.CompilationUnit(_WAVE).wave  # type: ignore[no-untyped-call]

    def forward(self, x: Tensor) -> Tensor:
        """Return the features of a batch of rows."""
        for layer in self.layers:
            x = self.wave(layer(x), self.scale)
        return x


class TwoModes(nn.Module):
    """One BatchNorm, called with its running statistics and with the batch's, by turns, in every forward."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Conv1d(width, width, 1) for _ in range(depth)])
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the features of (batch, width, length) after a norm in evaluation mode and one in training mode."""
        for index, layer in enumerate(self.layers):
            self.norm.train(index % 2 == 1)
            x = functional.silu(self.norm(layer(x))) + x
        return x
