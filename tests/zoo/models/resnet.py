"""Residual networks (He et al., 2016): basic and bottleneck blocks, in-place additions and activations."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn


def _conv(in_channels: int, out_channels: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(in_channels, out_channels, kernel, stride, kernel // 2, bias=False)


class Block(nn.Module):
    """A residual block: two 3x3 convolutions, or a bottleneck (1x1, 3x3, 1x1) of four times the width."""

    def __init__(self, in_channels: int, width: int, stride: int, *, bottleneck: bool) -> None:
        super().__init__()
        out_channels = width * (4 if bottleneck else 1)
        self.conv1 = _conv(in_channels, width, 1 if bottleneck else 3, 1 if bottleneck else stride)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = _conv(width, width, 3, stride if bottleneck else 1)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = _conv(width, out_channels, 1) if bottleneck else None
        self.bn3 = nn.BatchNorm2d(out_channels) if bottleneck else None
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module | None = None
        if stride != 1 or in_channels != out_channels:
            self.downsample = nn.Sequential(_conv(in_channels, out_channels, 1, stride), nn.BatchNorm2d(out_channels))

    def forward(self, x: Tensor) -> Tensor:
        """Add the block's convolutions to its (down-sampled) input, in place."""
        identity = x if self.downsample is None else self.downsample(x)
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        if self.conv3 is not None and self.bn3 is not None:
            out = self.bn3(self.conv3(self.relu(out)))
        out += identity
        result: Tensor = self.relu(out)
        return result


class ResNet(nn.Module):
    """A residual network of four stages.

    Args:
        layers: The number of blocks in each stage.
        bottleneck: Whether the blocks are bottlenecks.
        width: The channels of the first stage.
        num_classes: The number of outputs.
    """

    def __init__(self, layers: Sequence[int], *, bottleneck: bool, width: int = 64, num_classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, 3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        )
        channels = width
        stages: list[nn.Module] = []
        for index, num_blocks in enumerate(layers):
            stage_width = width * 2**index
            blocks: list[nn.Module] = []
            for position in range(num_blocks):
                stride = 2 if index > 0 and position == 0 else 1
                blocks.append(Block(channels, stage_width, stride, bottleneck=bottleneck))
                channels = stage_width * (4 if bottleneck else 1)
            stages.append(nn.Sequential(*blocks))
        self.stages = nn.Sequential(*stages)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(channels, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the class scores of a batch of images."""
        scores: Tensor = self.fc(self.pool(self.stages(self.stem(x))).flatten(1))
        return scores


def resnet50() -> ResNet:
    """The 50-layer network of the paper."""
    return ResNet((3, 4, 6, 3), bottleneck=True)


def resnet152() -> ResNet:
    """The 152-layer network of the paper."""
    return ResNet((3, 8, 36, 3), bottleneck=True)
