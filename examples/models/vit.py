"""The vision transformer (Dosovitskiy et al., ICLR 2021)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class EncoderLayer(nn.Module):
    """Attention and a feed-forward network, each behind a LayerNorm and added to its input."""

    def __init__(self, dim: int, heads: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(dim, eps=1e-6)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.norm2 = nn.LayerNorm(dim, eps=1e-6)
        self.mlp = nn.Sequential(
            nn.Linear(dim, hidden), nn.GELU(), nn.Dropout(dropout), nn.Linear(hidden, dim), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the tokens, of shape (batch, tokens, dim)."""
        batch, tokens, dim = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, tokens, 3, self.heads, dim // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value)
        x = x + self.proj(mixed.transpose(1, 2).reshape(batch, tokens, dim))
        result: Tensor = x + self.mlp(self.norm2(x))
        return result


class ViT(nn.Module):
    """Patches, a class token and learned positions through encoder layers.

    Args:
        image: Side of the images.
        patch: Side of a patch.
        dim: Width of a token.
        depth: Number of layers.
        heads: Attention heads.
        hidden: Width of the feed-forward networks.
        dropout: Rate in the feed-forward networks.
        num_classes: Number of outputs.
    """

    def __init__(
        self,
        *,
        image: int = 224,
        patch: int = 16,
        dim: int = 1024,
        depth: int = 24,
        heads: int = 16,
        hidden: int = 4096,
        dropout: float = 0.1,
        num_classes: int = 1000,
    ) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, dim, patch, patch)
        self.cls = nn.Parameter(torch.zeros(1, 1, dim))
        self.position = nn.Parameter(0.02 * torch.randn(1, (image // patch) ** 2 + 1, dim))
        self.layers = nn.Sequential(*[EncoderLayer(dim, heads, hidden, dropout) for _ in range(depth)])
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.head = nn.Linear(dim, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return the class scores of a batch of images."""
        tokens = self.embed(images).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.cls.expand(images.shape[0], -1, -1), tokens], 1) + self.position
        scores: Tensor = self.head(self.norm(self.layers(tokens))[:, 0])
        return scores


def vit_l_16(*, image: int = 224, dropout: float = 0.1, num_classes: int = 1000) -> ViT:
    """ViT-L/16."""
    return ViT(image=image, dropout=dropout, num_classes=num_classes)
