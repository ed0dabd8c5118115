"""Convolutional networks without shortcuts: AlexNet with response normalisation, and VGG."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_VGG16 = (2, 2, 3, 3, 3)
_VGG19 = (2, 2, 4, 4, 4)
_ALPHA, _BETA = 1e-4, 0.75
_NUM_SLICES = 16


class _ResponseNorm(torch.autograd.Function):
    """Local response normalisation that saves its input alone and goes through the batch slice by slice.

    PyTorch composes it of ops each of which has an output of full size; libraries of its time had one kernel.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int) -> Tensor:
        ctx.save_for_backward(x)
        ctx.size = size
        return torch.cat([part * _scale(part, size).pow(-_BETA) for part in x.chunk(_NUM_SLICES)])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        parts = zip(x.chunk(_NUM_SLICES), gradients[0].chunk(_NUM_SLICES), strict=True)
        return torch.cat([_response_gradient(part, gradient, ctx.size) for part, gradient in parts]), None


def _scale(x: Tensor, size: int) -> Tensor:
    """The base of the normalisation's power: k + alpha * mean of the squares of `size` channels."""
    return 1 + _ALPHA * _over_channels(x * x, size)


def _over_channels(x: Tensor, size: int) -> Tensor:
    """Means over windows of `size` channels, an odd number."""
    return F.avg_pool3d(x.unsqueeze(1), (size, 1, 1), 1, (size // 2, 0, 0)).squeeze(1)


def _response_gradient(x: Tensor, gradient: Tensor, size: int) -> Tensor:
    scale = _scale(x, size)
    direct = gradient * scale.pow(-_BETA)
    return direct - 2 * _ALPHA * _BETA * x * _over_channels(direct * x / scale, size)


class ResponseNorm(nn.Module):
    """Local response normalisation over `size` channels; see :class:`_ResponseNorm`."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised features, of shape (batch, channels, height, width)."""
        result: Tensor = _ResponseNorm.apply(x, self.size)
        return result


def _classifier(features: int, hidden: int, num_classes: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(features, hidden), nn.ReLU(inplace=True), nn.Dropout(),
        nn.Linear(hidden, hidden), nn.ReLU(inplace=True), nn.Dropout(),
        nn.Linear(hidden, num_classes),
    )  # fmt: skip


class AlexNet(nn.Module):
    """AlexNet (Krizhevsky et al., NeurIPS 2012) in one tower without groups, for 227x227 images.

    Args:
        num_classes: Number of outputs.
    """

    def __init__(self, *, num_classes: int = 1000) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 96, 11, 4), nn.ReLU(inplace=True), ResponseNorm(5), nn.MaxPool2d(3, 2),
            nn.Conv2d(96, 256, 5, 1, 2), nn.ReLU(inplace=True), ResponseNorm(5), nn.MaxPool2d(3, 2),
            nn.Conv2d(256, 384, 3, 1, 1), nn.ReLU(inplace=True),
            nn.Conv2d(384, 384, 3, 1, 1), nn.ReLU(inplace=True),
            nn.Conv2d(384, 256, 3, 1, 1), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2),
        )  # fmt: skip
        self.classifier = _classifier(256 * 6 * 6, 4096, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return the class scores of a batch of images."""
        scores: Tensor = self.classifier(self.features(images).flatten(1))
        return scores


class VGG(nn.Module):
    """Stages of 3x3 convolutions, each ended by a pooling (Simonyan and Zisserman, ICLR 2015).

    Args:
        stages: Convolutions in each of the five stages.
        batch_norm: Whether BatchNorm follows each convolution.
        num_classes: Number of outputs.
    """

    def __init__(self, stages: Sequence[int], *, batch_norm: bool, num_classes: int = 1000) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for index, num_convs in enumerate(stages):
            width = 64 * min(2**index, 8)
            for _ in range(num_convs):
                layers.append(nn.Conv2d(channels, width, 3, padding=1))
                layers += [nn.BatchNorm2d(width)] if batch_norm else []
                layers.append(nn.ReLU(inplace=True))
                channels = width
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.pool = nn.AdaptiveAvgPool2d(7)
        self.classifier = _classifier(channels * 7 * 7, 4096, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return the class scores of a batch of images."""
        scores: Tensor = self.classifier(self.pool(self.features(images)).flatten(1))
        return scores


def alexnet(*, num_classes: int = 1000) -> AlexNet:
    """AlexNet."""
    return AlexNet(num_classes=num_classes)


def vgg16(*, num_classes: int = 1000) -> VGG:
    """VGG-16."""
    return VGG(_VGG16, batch_norm=False, num_classes=num_classes)


def vgg16_bn(*, num_classes: int = 1000) -> VGG:
    """VGG-16 with BatchNorm."""
    return VGG(_VGG16, batch_norm=True, num_classes=num_classes)


def vgg19(*, num_classes: int = 1000) -> VGG:
    """VGG-19."""
    return VGG(_VGG19, batch_norm=False, num_classes=num_classes)


def vgg19_bn(*, num_classes: int = 1000) -> VGG:
    """VGG-19 with BatchNorm."""
    return VGG(_VGG19, batch_norm=True, num_classes=num_classes)
