"""The residual networks for 32x32 images, up to 1202 layers.

He et al., "Deep residual learning" (CVPR 2016) and, with activations before the convolutions, "Identity mappings in
deep residual networks" (ECCV 2016). Shortcuts have no parameters: they subsample and pad with zeros.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F


class BasicBlock(nn.Module):
    """Two 3x3 convolutions, added to the input.

    Args:
        in_channels: Channels of the input.
        out_channels: Channels of the output.
        stride: Of the first convolution.
        pre_activation: Whether BatchNorm and ReLU come before each convolution rather than after.
    """

    def __init__(self, in_channels: int, out_channels: int, stride: int, *, pre_activation: bool) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(in_channels if pre_activation else out_channels)
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, 1, 1, bias=False)
        self.stride = stride
        self.num_new = out_channels - in_channels
        self.pre_activation = pre_activation

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of both branches, activated unless that comes before the next convolution."""
        shortcut = x
        if self.stride != 1 or self.num_new:
            shortcut = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.num_new))
        if self.pre_activation:
            x = self.conv1(F.relu(self.bn1(x), inplace=True))
            return shortcut + self.conv2(F.relu(self.bn2(x), inplace=True))
        x = F.relu(self.bn1(self.conv1(x)), inplace=True)
        return F.relu(self.bn2(self.conv2(x)) + shortcut, inplace=True)


class CifarResNet(nn.Module):
    """A convolution, three stages of basic blocks on 32x32, 16x16 and 8x8 maps, and a linear classifier.

    Args:
        depth: Number of layers, six times the blocks of a stage, plus two.
        pre_activation: Whether BatchNorm and ReLU come before each convolution.
        num_classes: Number of outputs.

    Raises:
        ValueError: If there is no such depth.
    """

    def __init__(self, depth: int, *, pre_activation: bool, num_classes: int) -> None:
        super().__init__()
        if depth < 8 or (depth - 2) % 6:
            raise ValueError(f"depth {depth} is not 6 n + 2 with n >= 1; 20, 56, 110, 164 and 1202 are")
        self.conv = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        self.bn = nn.BatchNorm2d(64 if pre_activation else 16)
        channels, blocks = 16, []
        for width in (16, 32, 64):
            for _ in range((depth - 2) // 6):
                stride = 1 if width == channels else 2
                blocks.append(BasicBlock(channels, width, stride, pre_activation=pre_activation))
                channels = width
        self.blocks = nn.Sequential(*blocks)
        self.fc = nn.Linear(channels, num_classes)
        self.pre_activation = pre_activation

    def forward(self, images: Tensor) -> Tensor:
        """Return the class scores of a batch of images."""
        x = self.conv(images)
        if self.pre_activation:
            x = F.relu(self.bn(self.blocks(x)), inplace=True)
        else:
            x = self.blocks(F.relu(self.bn(x), inplace=True))
        scores: Tensor = self.fc(x.mean((2, 3)))
        return scores


def resnet_cifar(depth: int = 1202, *, pre_activation: bool = False, num_classes: int = 10) -> CifarResNet:
    """The residual network of a depth, for 32x32 images."""
    return CifarResNet(depth, pre_activation=pre_activation, num_classes=num_classes)
