"""Convolutional networks and vision transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.zoo.case import Case, TrainStep, adamw, integers, normal, simple
from tests.zoo.models.plain_conv import VGG, AlexNet, DenseNet
from tests.zoo.models.resnet import ResNet
from tests.zoo.models.vision import ConvNeXt, ViT

Images = tuple[Tensor, Tensor]


def images(num: int, side: int) -> Callable[[int], Images]:
    """Return a batch function of labelled square images."""
    return lambda step: (normal(step, num, 3, side, side), integers(step, 10, num))


def classify(model: nn.Module, batch: Images) -> Tensor:
    """The cross entropy of the model's scores."""
    return functional.cross_entropy(model(batch[0]), batch[1])


def _classify_bf16(model: nn.Module, batch: Images) -> Tensor:
    with torch.autocast(batch[0].device.type, dtype=torch.bfloat16):
        return classify(model, batch)


def _classify_channels_last(model: nn.Module, batch: Images) -> Tensor:
    return classify(model, (batch[0].to(memory_format=torch.channels_last), batch[1]))


def _tiny_resnet(*, bottleneck: bool = False) -> nn.Module:
    return ResNet((2, 2, 1), bottleneck=bottleneck, width=8, num_classes=10)


class _FrozenNorms(ResNet):
    """Fine-tuned with the statistics that it came with: its norms are in evaluation mode, whatever the mode."""

    def train(self, mode: bool = True) -> _FrozenNorms:
        """Set the mode of all but the norms."""
        super().train(mode)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()
        return self


def _frozen_norms() -> nn.Module:
    return _FrozenNorms((2, 1), bottleneck=False, width=8, num_classes=10).train()


def _tiny_vgg(*, batch_norm: bool) -> nn.Module:
    return VGG((1, 1, 2), width=8, hidden=32, grid=2, batch_norm=batch_norm, num_classes=10)


def _channels_last_resnet() -> nn.Module:
    return _tiny_resnet().to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]


def _vision(
    name: str, build: Callable[[], nn.Module], num: int, side: int, loss: Any = classify, **options: Any
) -> Case:
    step: TrainStep = simple(loss)
    return Case(name=name, build=build, batch=images(num, side), train_step=step, **options)


VISION: tuple[Case, ...] = (
    _vision("resnet-basic", _tiny_resnet, 48, 32, budgeted=True),
    _vision("resnet-bottleneck", lambda: _tiny_resnet(bottleneck=True), 16, 32, budgeted=True),
    _vision("resnet-channels-last", _channels_last_resnet, 40, 32, _classify_channels_last, budgeted=True),
    _vision("resnet-frozen-norms", _frozen_norms, 48, 32, budgeted=True),
    _vision("resnet-bf16", _tiny_resnet, 48, 32, _classify_bf16),
    _vision("vgg", lambda: _tiny_vgg(batch_norm=False), 24, 32, budgeted=True),
    _vision("vgg-batchnorm", lambda: _tiny_vgg(batch_norm=True), 20, 32, budgeted=True),
    _vision("alexnet", lambda: AlexNet(width=8, num_classes=10, grid=1), 32, 64, budgeted=True),
    _vision("densenet", lambda: DenseNet((3, 3)), 6, 32, budgeted=True),
    _vision("vit", ViT, 8, 32, optimizers=adamw, budgeted=True),
    _vision("convnext", ConvNeXt, 8, 32, optimizers=adamw, budgeted=True),
)
