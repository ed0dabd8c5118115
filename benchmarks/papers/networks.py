"""Networks that the papers' tables have and the examples do not: Inception, ResNet-34, a wide ResNet, language models.

Inception-V3 (Szegedy et al., CVPR 2016) and -V4 (Szegedy et al., AAAI 2017) are without auxiliary classifiers, on
images of 299x299; WRN-28-10 (Zagoruyko and Komodakis, BMVC 2016) is for 32x32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from examples.models import Example
from examples.models.registry import image_example
from tests.zoo.models.resnet import ResNet

_Size = int | tuple[int, int]
Layer = tuple[int, _Size] | tuple[int, _Size, int]
"""Channels of the output, size of the kernel, and the stride where it is not 1."""


def _unit(in_channels: int, out_channels: int, kernel: _Size, stride: int = 1, *, is_padded: bool = True) -> nn.Module:
    """A convolution, BatchNorm and ReLU; one with a stride has no padding."""
    sizes = (kernel, kernel) if isinstance(kernel, int) else kernel
    padding = (sizes[0] // 2, sizes[1] // 2) if stride == 1 and is_padded else 0
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, kernel, stride, padding, bias=False),
        nn.BatchNorm2d(out_channels),
        nn.ReLU(inplace=True),
    )


def _units(in_channels: int, layers: Sequence[Layer]) -> nn.Sequential:
    units = []
    for out_channels, *how in layers:
        units.append(_unit(in_channels, out_channels, *how))  # type: ignore[arg-type]
        in_channels = out_channels
    return nn.Sequential(*units)


class _Branches(nn.Module):
    """Branches side by side, their outputs one after the other by channel."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], 1)


def _block(in_channels: int, *branches: Sequence[Layer], pooled: int = 0) -> nn.Module:
    """Branches of units, and one of an average pooling and a 1x1 convolution, or without channels of a max pooling."""
    last = (
        nn.Sequential(nn.AvgPool2d(3, 1, 1), _unit(in_channels, pooled, 1)) if pooled else nn.MaxPool2d(3, 2)
    )  # fmt: skip
    return _Branches(*(_units(in_channels, layers) for layers in branches), last)


def _split(in_channels: int, layers: Sequence[Layer], width: int) -> nn.Sequential:
    """Units, and a 1x3 and a 3x1 convolution side by side on their output."""
    before = layers[-1][0]
    ends = _Branches(_unit(before, width, (1, 3)), _unit(before, width, (3, 1)))
    return nn.Sequential(_units(in_channels, layers), ends)


def _spread(in_channels: int, first: int, splits: Sequence[Sequence[Layer]], width: int, pooled: int) -> nn.Module:
    """The block of the smallest maps."""
    return _Branches(
        _unit(in_channels, first, 1),
        *(_split(in_channels, layers, width) for layers in splits),
        nn.Sequential(nn.AvgPool2d(3, 1, 1), _unit(in_channels, pooled, 1)),
    )


def _classifier(features: Sequence[nn.Module], channels: int) -> nn.Module:
    return nn.Sequential(*features, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(), nn.Linear(channels, 1000))


def _stem() -> list[nn.Module]:
    return [_unit(3, 32, 3, 2), _unit(32, 32, 3, is_padded=False), _unit(32, 64, 3)]


def inception_v3() -> nn.Module:
    """Inception-V3."""
    wide, tall = (1, 7), (7, 1)
    features = [
        *_stem(), nn.MaxPool2d(3, 2), _unit(64, 80, 1), _unit(80, 192, 3, is_padded=False), nn.MaxPool2d(3, 2)
    ]  # fmt: skip
    for channels, pooled in ((192, 32), (256, 64), (288, 64)):
        branches = [(64, 1)], [(48, 1), (64, 5)], [(64, 1), (96, 3), (96, 3)]
        features.append(_block(channels, *branches, pooled=pooled))
    features.append(_block(288, [(384, 3, 2)], [(64, 1), (96, 3), (96, 3, 2)]))
    for width in (128, 160, 160, 192):
        once = [(width, 1), (width, wide), (192, tall)]
        twice = [(width, 1), (width, tall), (width, wide), (width, tall), (192, wide)]
        features.append(_block(768, [(192, 1)], once, twice, pooled=192))
    features.append(_block(768, [(192, 1), (320, 3, 2)], [(192, 1), (192, wide), (192, tall), (192, 3, 2)]))
    for channels in (1280, 2048):
        features.append(_spread(channels, 320, ([(384, 1)], [(448, 1), (384, 3)]), 384, 192))
    return _classifier(features, 2048)


def inception_v4() -> nn.Module:
    """Inception-V4."""
    wide, tall = (1, 7), (7, 1)
    around = nn.Sequential(
        _unit(160, 64, 1), _unit(64, 64, wide), _unit(64, 64, tall), _unit(64, 96, 3, is_padded=False)
    )  # fmt: skip
    features = [
        *_stem(), _block(64, [(96, 3, 2)]),
        _Branches(nn.Sequential(_unit(160, 64, 1), _unit(64, 96, 3, is_padded=False)), around),
        _block(192, [(192, 3, 2)]),
    ]  # fmt: skip
    for _ in range(4):
        branches = [(96, 1)], [(64, 1), (96, 3)], [(64, 1), (96, 3), (96, 3)]
        features.append(_block(384, *branches, pooled=96))
    features.append(_block(384, [(384, 3, 2)], [(192, 1), (224, 3), (256, 3, 2)]))
    for _ in range(7):
        once = [(192, 1), (224, wide), (256, tall)]
        twice = [(192, 1), (192, tall), (224, wide), (224, tall), (256, wide)]
        features.append(_block(1024, [(384, 1)], once, twice, pooled=128))
    features.append(_block(1024, [(192, 1), (192, 3, 2)], [(256, 1), (256, wide), (320, tall), (320, 3, 2)]))
    for _ in range(3):
        features.append(_spread(1536, 256, ([(384, 1)], [(384, 1), (448, (3, 1)), (512, (1, 3))]), 256, 256))
    return _classifier(features, 1536)


class _Wide(nn.Module):
    """BatchNorm, ReLU and a 3x3 convolution, twice, added to the input.

    Args:
        in_channels: Channels of the input.
        channels: Channels of the output.
        stride: Of the first convolution.
    """

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        self.bn1, self.bn2 = nn.BatchNorm2d(in_channels), nn.BatchNorm2d(channels)
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        is_same = stride == 1 and in_channels == channels
        self.shortcut = nn.Identity() if is_same else nn.Conv2d(in_channels, channels, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        identity = self.shortcut(x)
        out = self.conv1(F.relu(self.bn1(x), inplace=True))
        out = self.conv2(F.relu(self.bn2(out), inplace=True))
        out += identity
        return out


resnet34 = functools.partial(ResNet, (3, 4, 6, 3), bottleneck=False)
"""ResNet-34 (He et al., CVPR 2016)."""


def wrn_28_10() -> nn.Module:
    """The wide residual network of 28 layers, ten times as wide, without dropout."""
    blocks, in_channels = [], 16
    for channels, stride in ((160, 1), (320, 2), (640, 2)):
        for position in range(4):
            blocks.append(_Wide(in_channels, channels, stride if position == 0 else 1))
            in_channels = channels
    end = (nn.BatchNorm2d(640), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(640, 10))
    return nn.Sequential(nn.Conv2d(3, 16, 3, 1, 1, bias=False), *blocks, *end)


class _LSTMLanguageModel(nn.Module):
    """An embedding, LSTM layers and a classifier of the next token.

    Args:
        vocabulary: Number of tokens.
        hidden: Width of embedding and layers.
        layers: Number of layers.
    """

    def __init__(self, vocabulary: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.lstm = nn.LSTM(hidden, hidden, layers, batch_first=True)
        self.head = nn.Linear(hidden, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        scores: Tensor = self.head(self.lstm(self.embedding(tokens))[0])
        return scores


def _token_example(build: Callable[[], nn.Module], vocabulary: int, length: int) -> Example:
    def inputs(batch_size: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        return (torch.randint(0, vocabulary, (batch_size, length)),)

    def loss(model: nn.Module, given: tuple[Tensor, ...]) -> Tensor:
        output: Any = model(given[0])
        scores = output if isinstance(output, Tensor) else output.logits
        return F.cross_entropy(scores.flatten(0, 1), given[0].roll(-1, 1).flatten())

    return Example(build=build, inputs=inputs, loss=loss, batch_size=32)


def _lstm_example(layers: int) -> Example:
    """A language model of LSTM layers."""
    return _token_example(functools.partial(_LSTMLanguageModel, 16_000, 1024, layers), 16_000, 20)


def _bert_base() -> nn.Module:
    """BERT-base with its masked-language-model head (Devlin et al., NAACL 2019)."""
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(attn_implementation="eager"))


NETWORKS: dict[str, Example] = {
    "inception-v3": image_example(inception_v3, 64, side=299),
    "inception-v4": image_example(inception_v4, 32, side=299),
    "resnet34": image_example(resnet34, 64),
    "wrn-28-10": image_example(wrn_28_10, 64, side=32, num_classes=10),
    "bert-base": _token_example(_bert_base, 30_522, 128),
    **{f"lstm-{layers}": _lstm_example(layers) for layers in (1, 4, 8, 16)},
}
"""By name, those of the examples aside."""
