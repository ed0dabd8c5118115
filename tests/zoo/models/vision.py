"""Newer vision networks: ViT (Dosovitskiy et al., 2021) and ConvNeXt (Liu et al., 2022)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional


class EncoderLayer(nn.Module):
    """A pre-norm transformer layer with one fused query-key-value projection."""

    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.norm1 = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(
            nn.Linear(dim, 4 * dim),
            nn.GELU(),
            nn.Dropout(dropout),
            nn.Linear(4 * dim, dim),
            nn.Dropout(dropout),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the tokens after attention and the feed-forward network."""
        batch, tokens, dim = x.shape
        qkv = self.qkv(self.norm1(x)).reshape(batch, tokens, 3, self.heads, dim // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        rate = self.dropout if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(query, key, value, dropout_p=rate)
        x = x + self.proj(mixed.transpose(1, 2).reshape(batch, tokens, dim))
        result: Tensor = x + self.mlp(self.norm2(x))
        return result


class ViT(nn.Module):
    """A vision transformer with a class token and learned positions."""

    def __init__(
        self,
        *,
        image: int = 32,
        patch: int = 4,
        dim: int = 64,
        depth: int = 3,
        heads: int = 4,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, dim, patch, patch)
        self.cls = nn.Parameter(torch.zeros(1, 1, dim))
        self.position = nn.Parameter(0.02 * torch.randn(1, (image // patch) ** 2 + 1, dim))
        self.layers = nn.Sequential(*[EncoderLayer(dim, heads, dropout) for _ in range(depth)])
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return the class scores of a batch of images."""
        tokens = self.embed(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.cls.expand(x.shape[0], -1, -1), tokens], 1) + self.position
        scores: Tensor = self.head(self.norm(self.layers(tokens))[:, 0])
        return scores


class ConvNeXtBlock(nn.Module):
    """A depthwise convolution, a channels-last inverted bottleneck, layer scale and stochastic depth."""

    def __init__(self, dim: int, drop_path: float) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(dim, dim, 7, padding=3, groups=dim)
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.expand = nn.Linear(dim, 4 * dim)
        self.reduce = nn.Linear(4 * dim, dim)
        self.gamma = nn.Parameter(0.1 * torch.ones(dim))
        self.drop_path = drop_path

    def forward(self, x: Tensor) -> Tensor:
        """Return the input plus the block's output, which is dropped for random samples in training."""
        out = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        out = self.gamma * self.reduce(functional.gelu(self.expand(out)))
        out = out.permute(0, 3, 1, 2)
        if self.training and self.drop_path > 0:
            keep = 1 - self.drop_path
            mask = out.new_empty((out.shape[0], 1, 1, 1)).bernoulli_(keep)
            out = out * mask.div_(keep)
        return x + out


class ConvNeXt(nn.Module):
    """A ConvNeXt of the given depths and widths."""

    def __init__(self, depths: Sequence[int] = (1, 2), dims: Sequence[int] = (16, 32)) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, dims[0], 2, 2)
        stages: list[nn.Module] = []
        for index, (depth, dim) in enumerate(zip(depths, dims, strict=True)):
            blocks: list[nn.Module] = [ConvNeXtBlock(dim, 0.2) for _ in range(depth)]
            if index > 0:
                blocks.insert(0, nn.Conv2d(dims[index - 1], dim, 2, 2))
            stages.append(nn.Sequential(*blocks))
        self.stages = nn.Sequential(*stages)
        self.norm = nn.LayerNorm(dims[-1])
        self.head = nn.Linear(dims[-1], 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return the class scores of a batch of images."""
        scores: Tensor = self.head(self.norm(self.stages(self.stem(x)).mean((2, 3))))
        return scores
