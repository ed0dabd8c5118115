"""Convolutional networks without shortcuts, and with concatenation: AlexNet, VGG, DenseNet."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class AlexNet(nn.Module):
    """The single-column AlexNet (Krizhevsky, 2014).

    Args:
        width: Scales every layer; 64 gives the paper's size.
        num_classes: The number of outputs.
        grid: The side of the pooled feature map that feeds the classifier.
    """

    def __init__(self, width: int = 64, num_classes: int = 1000, grid: int = 6) -> None:
        super().__init__()
        w = width
        self.features = nn.Sequential(
            nn.Conv2d(3, w, 11, 4, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2),
            nn.Conv2d(w, 3 * w, 5, 1, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2),
            nn.Conv2d(3 * w, 6 * w, 3, 1, 1), nn.ReLU(inplace=True),
            nn.Conv2d(6 * w, 4 * w, 3, 1, 1), nn.ReLU(inplace=True),
            nn.Conv2d(4 * w, 4 * w, 3, 1, 1), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2),
        )  # fmt: skip
        self.pool = nn.AdaptiveAvgPool2d(grid)
        self.classifier = nn.Sequential(
            nn.Dropout(), nn.Linear(4 * w * grid * grid, 64 * w), nn.ReLU(inplace=True),
            nn.Dropout(), nn.Linear(64 * w, 64 * w), nn.ReLU(inplace=True),
            nn.Linear(64 * w, num_classes),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        """Return the class scores of a batch of images."""
        scores: Tensor = self.classifier(self.pool(self.features(x)).flatten(1))
        return scores


class VGG(nn.Module):
    """A VGG network (Simonyan and Zisserman, 2015).

    Args:
        stages: The number of 3x3 convolutions before each pooling.
        width: The channels of the first stage; the third doubles twice, the rest stay at eight times it.
        hidden: The width of the classifier.
        grid: The side of the pooled feature map that feeds the classifier.
        batch_norm: Whether each convolution is followed by BatchNorm.
        num_classes: The number of outputs.
    """

    def __init__(
        self,
        stages: Sequence[int],
        *,
        width: int = 64,
        hidden: int = 4096,
        grid: int = 7,
        batch_norm: bool = False,
        num_classes: int = 1000,
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for index, num_convs in enumerate(stages):
            out_channels = width * min(2**index, 8)
            for _ in range(num_convs):
                layers.append(nn.Conv2d(channels, out_channels, 3, padding=1))
                if batch_norm:
                    layers.append(nn.BatchNorm2d(out_channels))
                layers.append(nn.ReLU(inplace=True))
                channels = out_channels
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.pool = nn.AdaptiveAvgPool2d(grid)
        self.classifier = nn.Sequential(
            nn.Linear(channels * grid * grid, hidden), nn.ReLU(inplace=True), nn.Dropout(),
            nn.Linear(hidden, hidden), nn.ReLU(inplace=True), nn.Dropout(),
            nn.Linear(hidden, num_classes),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        """Return the class scores of a batch of images."""
        scores: Tensor = self.classifier(self.pool(self.features(x)).flatten(1))
        return scores


def vgg19() -> VGG:
    """The 19-layer network of the paper."""
    return VGG((2, 2, 4, 4, 4))


class DenseLayer(nn.Module):
    """BatchNorm, ReLU and a convolution over all earlier features, concatenated (Huang et al., 2017)."""

    def __init__(self, in_channels: int, growth: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(in_channels)
        self.relu = nn.ReLU(inplace=True)
        self.conv = nn.Conv2d(in_channels, growth, 3, padding=1, bias=False)

    def forward(self, features: list[Tensor]) -> Tensor:
        """Return this layer's new features."""
        new: Tensor = self.conv(self.relu(self.norm(torch.cat(features, 1))))
        return new


class DenseNet(nn.Module):
    """Dense blocks with transitions between them.

    Args:
        blocks: The number of layers in each block.
        growth: The channels every layer adds.
        num_classes: The number of outputs.
    """

    def __init__(self, blocks: Sequence[int], growth: int = 8, num_classes: int = 10) -> None:
        super().__init__()
        channels = 2 * growth
        self.stem = nn.Conv2d(3, channels, 3, padding=1, bias=False)
        self.blocks = nn.ModuleList()
        self.transitions = nn.ModuleList()
        for num_layers in blocks:
            layers = [DenseLayer(channels + i * growth, growth) for i in range(num_layers)]
            self.blocks.append(nn.ModuleList(layers))
            channels += num_layers * growth
            transition = nn.Sequential(nn.Conv2d(channels, channels // 2, 1, bias=False), nn.AvgPool2d(2))
            self.transitions.append(transition)
            channels //= 2
        self.fc = nn.Linear(channels, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the class scores of a batch of images."""
        x = self.stem(x)
        for block, transition in zip(self.blocks, self.transitions, strict=True):
            features = [x]
            for layer in block:  # type: ignore[attr-defined]
                features.append(layer(features))
            x = transition(torch.cat(features, 1))
        scores: Tensor = self.fc(x.mean((2, 3)))
        return scores
