"""Residual networks of bottleneck blocks (He et al., CVPR 2016), of any depth.

The stride of a block is in its 3x3 convolution, as in most libraries today; additions and ReLU are in place.
"""

from __future__ import annotations

from torch import Tensor, nn

_EXPANSION = 4


def _conv(in_channels: int, out_channels: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(in_channels, out_channels, kernel, stride, kernel // 2, bias=False)


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions, added to the (projected) input.

    Args:
        in_channels: Channels of the input.
        width: Channels of the 3x3 convolution; the output has four times as many.
        stride: Of the 3x3 convolution.
    """

    def __init__(self, in_channels: int, width: int, stride: int = 1) -> None:
        super().__init__()
        out_channels = _EXPANSION * width
        self.conv1 = _conv(in_channels, width, 1)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = _conv(width, width, 3, stride)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = _conv(width, out_channels, 1)
        self.bn3 = nn.BatchNorm2d(out_channels)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module | None = None
        if stride != 1 or in_channels != out_channels:
            self.shortcut = nn.Sequential(_conv(in_channels, out_channels, 1, stride), nn.BatchNorm2d(out_channels))

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of both branches, activated."""
        identity = x if self.shortcut is None else self.shortcut(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += identity
        result: Tensor = self.relu(out)
        return result


class ResNet(nn.Module):
    """A stem, stages of bottleneck blocks, and a linear classifier.

    Args:
        blocks: Blocks in each stage; the depth is three times their sum, plus two. Four stages in the published ones.
        num_classes: Number of outputs.
        width: Channels of the stem; each stage but the first doubles them.
    """

    def __init__(self, blocks: tuple[int, ...], *, num_classes: int = 1000, width: int = 64) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            _conv(3, width, 7, 2), nn.BatchNorm2d(width), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        )  # fmt: skip
        channels, stages = width, []
        for index, num_blocks in enumerate(blocks):
            stage = []
            for position in range(num_blocks):
                stage.append(Bottleneck(channels, width << index, 2 if index > 0 and position == 0 else 1))
                channels = _EXPANSION * (width << index)
            stages.append(nn.Sequential(*stage))
        self.stages = nn.Sequential(*stages)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(channels, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return the class scores of a batch of images."""
        scores: Tensor = self.fc(self.pool(self.stages(self.stem(images))).flatten(1))
        return scores


def resnet(n1: int = 3, n2: int = 4, n3: int = 6, n4: int = 3, *, num_classes: int = 1000) -> ResNet:
    """The network with that many blocks in its four stages: of 3 * (n1 + n2 + n3 + n4) + 2 layers."""
    return ResNet((n1, n2, n3, n4), num_classes=num_classes)


def resnet50(*, num_classes: int = 1000, width: int = 64) -> ResNet:
    """ResNet-50; of another width it is as deep."""
    return ResNet((3, 4, 6, 3), num_classes=num_classes, width=width)


def resnet101(*, num_classes: int = 1000) -> ResNet:
    """ResNet-101."""
    return resnet(3, 4, 23, 3, num_classes=num_classes)


def resnet152(*, num_classes: int = 1000) -> ResNet:
    """ResNet-152."""
    return resnet(3, 8, 36, 3, num_classes=num_classes)


def resnet200(*, num_classes: int = 1000) -> ResNet:
    """ResNet-200, with its blocks in the same order as the others."""
    return resnet(3, 24, 36, 3, num_classes=num_classes)
