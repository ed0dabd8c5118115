"""ResNet-50 (He et al., Deep Residual Learning for Image Recognition, 2015), in plain PyTorch.

The stride sits in the 3x3 convolution, as in the variant that most frameworks ship. Nothing here knows about
memory budgets: the demo trains exactly this module both ways.
"""

from __future__ import annotations

from torch import Tensor, nn

NUM_PARAMETERS_1000_CLASSES = 25_557_032
"""Parameters of the published architecture with 1000 classes; the demo refuses to run on anything else."""

_EXPANSION = 4
_BLOCKS_PER_STAGE = (3, 4, 6, 3)


class Bottleneck(nn.Module):
    """A residual block: 1x1 down, 3x3, 1x1 up, added to its input."""

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        out_channels = channels * _EXPANSION
        self.conv1 = nn.Conv2d(in_channels, channels, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.conv3 = nn.Conv2d(channels, out_channels, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(out_channels)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module | None = None
        if stride != 1 or in_channels != out_channels:
            self.downsample = nn.Sequential(
                nn.Conv2d(in_channels, out_channels, 1, stride=stride, bias=False),
                nn.BatchNorm2d(out_channels),
            )

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output for `x` of shape (batch, in_channels, height, width)."""
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += identity
        result: Tensor = self.relu(out)
        return result


class ResNet50(nn.Module):
    """The 50-layer network: a stem, four stages of bottleneck blocks, pooling and a linear classifier.

    Args:
        num_classes: Width of the classifier.
        width: Channels of the stem; 64 is the published network, less makes a small one for tests.
        blocks: Blocks per stage; the default is the published network.
    """

    def __init__(
        self, num_classes: int = 1000, *, width: int = 64, blocks: tuple[int, ...] = _BLOCKS_PER_STAGE
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        self.stages = nn.Sequential(*_stages(width, blocks))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(width * 2 ** (len(blocks) - 1) * _EXPANSION, num_classes)
        self.apply(_initialise)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits of shape (batch, num_classes) for `images` of shape (batch, 3, height, width)."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        x = self.avgpool(self.stages(x))
        logits: Tensor = self.fc(x.flatten(1))
        return logits


def _stages(width: int, blocks: tuple[int, ...]) -> list[nn.Module]:
    """Return the stages; each but the first halves the resolution and doubles the channels."""
    stages: list[nn.Module] = []
    in_channels = width
    for index, num_blocks in enumerate(blocks):
        channels = width * 2**index
        stage: list[nn.Module] = []
        for block in range(num_blocks):
            stage.append(Bottleneck(in_channels, channels, stride=2 if index > 0 and block == 0 else 1))
            in_channels = channels * _EXPANSION
        stages.append(nn.Sequential(*stage))
    return stages


def _initialise(module: nn.Module) -> None:
    """Draw convolution weights as in the paper on rectifiers (He et al., 2015)."""
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


def count_parameters(module: nn.Module) -> int:
    """Return the number of scalars in all parameters of `module`."""
    return sum(parameter.numel() for parameter in module.parameters())
