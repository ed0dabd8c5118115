"""The models of the public measurements, where `examples.models` does not have them, each with its step.

Sizes are those of the papers and of the measured libraries' defaults. Attention is composed of products and a softmax
where the measured library had no fused kernel yet.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from examples.models import plain, residual
from examples.models.registry import Example, image_example
from tests.zoo.models.resnet import ResNet


class _Bottleneck(nn.Module):
    """A bottleneck of any inner width, with groups."""

    def __init__(self, in_channels: int, inner: int, out_channels: int, stride: int, groups: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(in_channels, inner, 1, bias=False),
            nn.BatchNorm2d(inner),
            nn.ReLU(inplace=True),
            nn.Conv2d(inner, inner, 3, stride, 1, groups=groups, bias=False),
            nn.BatchNorm2d(inner),
            nn.ReLU(inplace=True),
            nn.Conv2d(inner, out_channels, 1, bias=False),
            nn.BatchNorm2d(out_channels),
        )
        self.shortcut = _projection(in_channels, out_channels, stride)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu_(self.body(x) + self.shortcut(x))


def _projection(in_channels: int, out_channels: int, stride: int) -> nn.Module:
    if stride == 1 and in_channels == out_channels:
        return nn.Identity()
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, 1, stride, bias=False), nn.BatchNorm2d(out_channels)
    )  # fmt: skip


def _stem(channels: int) -> list[nn.Module]:
    return [
        nn.Conv2d(3, channels, 7, 2, 3, bias=False),
        nn.BatchNorm2d(channels),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
    ]


def _classified(layers: list[nn.Module], channels: int) -> nn.Module:
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000))


def _bottleneck_resnet(width: int, groups: int) -> nn.Module:
    """Wide ResNets and ResNeXt of 50 layers; `width` is the inner width of the first stage."""
    layers, channels = _stem(64), 64
    for index, num_blocks in enumerate((3, 4, 6, 3)):
        for place in range(num_blocks):
            stride = 2 if index and not place else 1
            layers.append(_Bottleneck(channels, width << index, 256 << index, stride, groups))
            channels = 256 << index
    return _classified(layers, channels)


def _alexnet_owt() -> nn.Module:
    """AlexNet of "One weird trick" (Krizhevsky, 2014), without the dropout that the measurement leaves out."""
    return nn.Sequential(
        nn.Conv2d(3, 64, 11, 4, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2),
        nn.Conv2d(64, 192, 5, 1, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2),
        nn.Conv2d(192, 384, 3, 1, 1), nn.ReLU(inplace=True), nn.Conv2d(384, 256, 3, 1, 1), nn.ReLU(inplace=True),
        nn.Conv2d(256, 256, 3, 1, 1), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2), nn.Flatten(),
        nn.Linear(256 * 36, 4096), nn.ReLU(inplace=True), nn.Linear(4096, 4096), nn.ReLU(inplace=True),
        nn.Linear(4096, 1000),
    )  # fmt: skip


def _vgg11() -> nn.Module:
    return plain.VGG((1, 1, 2, 2, 2), batch_norm=False)


class _Dense(nn.Module):
    """A layer of DenseNet: its input with 32 more channels."""

    def __init__(self, channels: int, growth: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.BatchNorm2d(channels), nn.ReLU(inplace=True), nn.Conv2d(channels, 4 * growth, 1, bias=False),
            nn.BatchNorm2d(4 * growth), nn.ReLU(inplace=True),
            nn.Conv2d(4 * growth, growth, 3, 1, 1, bias=False),
        )  # fmt: skip

    def forward(self, *features: Tensor) -> Tensor:
        result: Tensor = self.body(torch.cat(features, 1))
        return result


class _DenseBlock(nn.Module):
    def __init__(self, channels: int, growth: int, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Dense(channels + growth * place, growth) for place in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for layer in self.layers:
            features.append(layer(*features))
        return torch.cat(features, 1)


def _densenet121() -> nn.Module:
    """DenseNet-121 (Huang et al., CVPR 2017)."""
    layers, channels = _stem(64), 64
    for index, num_layers in enumerate((6, 12, 24, 16)):
        layers.append(_DenseBlock(channels, 32, num_layers))
        channels += 32 * num_layers
        layers += [nn.BatchNorm2d(channels), nn.ReLU(inplace=True)]
        if index < 3:
            layers += [nn.Conv2d(channels, channels // 2, 1, bias=False), nn.AvgPool2d(2)]
            channels //= 2
    return _classified(layers, channels)


class _Inverted(nn.Module):
    def __init__(self, in_channels: int, out_channels: int, stride: int, expansion: int) -> None:
        super().__init__()
        inner = in_channels * expansion
        expand = [nn.Conv2d(in_channels, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU6(inplace=True)]
        self.body = nn.Sequential(
            *(expand if expansion > 1 else []),
            nn.Conv2d(inner, inner, 3, stride, 1, groups=inner, bias=False), nn.BatchNorm2d(inner),
            nn.ReLU6(inplace=True), nn.Conv2d(inner, out_channels, 1, bias=False), nn.BatchNorm2d(out_channels),
        )  # fmt: skip
        self.is_added = stride == 1 and in_channels == out_channels

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.body(x)
        return x + result if self.is_added else result


def _mobilenetv2() -> nn.Module:
    """MobileNetV2 (Sandler et al., CVPR 2018)."""
    layers: list[nn.Module] = [nn.Conv2d(3, 32, 3, 2, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU6(inplace=True)]
    channels = 32
    for expansion, width, num_blocks, stride in (
        (1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1),
    ):  # fmt: skip
        for place in range(num_blocks):
            layers.append(_Inverted(channels, width, 1 if place else stride, expansion))
            channels = width
    layers += [nn.Conv2d(channels, 1280, 1, bias=False), nn.BatchNorm2d(1280), nn.ReLU6(inplace=True)]
    return _classified(layers, 1280)


class _ChannelNorm(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(channels, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return result


class _ConvNextBlock(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.spatial = nn.Conv2d(channels, channels, 7, 1, 3, groups=channels)
        self.norm = nn.LayerNorm(channels, eps=1e-6)
        self.up, self.down = nn.Linear(channels, 4 * channels), nn.Linear(4 * channels, channels)
        self.scale = nn.Parameter(torch.ones(channels, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.spatial(x).permute(0, 2, 3, 1))
        y = self.down(F.gelu(self.up(y))).permute(0, 3, 1, 2)
        result: Tensor = x + y * self.scale
        return result


def _convnext_tiny() -> nn.Module:
    """ConvNeXt-T (Liu et al., CVPR 2022)."""
    layers: list[nn.Module] = [nn.Conv2d(3, 96, 4, 4), _ChannelNorm(96)]
    channels = 96
    for index, num_blocks in enumerate((3, 3, 9, 3)):
        if index:
            layers += [_ChannelNorm(channels), nn.Conv2d(channels, 2 * channels, 2, 2)]
            channels *= 2
        layers += [_ConvNextBlock(channels) for _ in range(num_blocks)]
    return _classified(layers, channels)


class _Attention(nn.Module):
    """Composed of products and a softmax, or the fused causal kernel."""

    def __init__(self, dim: int, heads: int, *, is_fused: bool, has_bias: bool) -> None:
        super().__init__()
        self.heads, self.is_fused = heads, is_fused
        self.qkv, self.proj = nn.Linear(dim, 3 * dim, bias=has_bias), nn.Linear(dim, dim, bias=has_bias)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, dim = x.shape
        qkv = self.qkv(x).view(batch, tokens, 3, self.heads, dim // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        if self.is_fused:
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            mixed = F.softmax(query @ key.transpose(-2, -1) * (dim // self.heads) ** -0.5, -1) @ value
        result: Tensor = self.proj(mixed.transpose(1, 2).reshape(batch, tokens, dim))
        return result


class _Layer(nn.Module):
    def __init__(self, dim: int, heads: int, *, is_fused: bool, has_bias: bool) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, bias=has_bias)
        self.attention = _Attention(dim, heads, is_fused=is_fused, has_bias=has_bias)
        self.norm2 = nn.LayerNorm(dim, bias=has_bias)
        self.up, self.down = nn.Linear(dim, 4 * dim, bias=has_bias), nn.Linear(4 * dim, dim, bias=has_bias)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        result: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return result


class _ViT(nn.Module):
    """A vision transformer on patches of 16 (Dosovitskiy et al., ICLR 2021)."""

    def __init__(self, dim: int, depth: int, heads: int) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, dim, 16, 16)
        self.cls = nn.Parameter(torch.zeros(1, 1, dim))
        self.position = nn.Parameter(torch.zeros(1, 197, dim))
        layers = [_Layer(dim, heads, is_fused=False, has_bias=True) for _ in range(depth)]
        self.layers = nn.Sequential(*layers, nn.LayerNorm(dim))
        self.head = nn.Linear(dim, 1000)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.embed(images).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.cls.expand(images.shape[0], -1, -1), tokens], 1) + self.position
        scores: Tensor = self.head(self.layers(tokens)[:, 0])
        return scores


class _MixerLayer(nn.Module):
    def __init__(self, dim: int, tokens: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.over_tokens = nn.Sequential(nn.Linear(tokens, dim // 2), nn.GELU(), nn.Linear(dim // 2, tokens))
        self.over_channels = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.over_tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        result: Tensor = x + self.over_channels(self.norm2(x))
        return result


class _Mixer(nn.Module):
    """MLP-Mixer B/16 (Tolstikhin et al., NeurIPS 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, 768, 16, 16)
        self.layers = nn.Sequential(*[_MixerLayer(768, 196) for _ in range(12)], nn.LayerNorm(768))
        self.head = nn.Linear(768, 1000)

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.head(self.layers(self.embed(images).flatten(2).transpose(1, 2)).mean(1))
        return scores


class _Decoder(nn.Module):
    """A GPT without biases, with the fused attention kernel and tied embeddings: MPT but for its ALiBi."""

    def __init__(self, dim: int, depth: int, heads: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(50_368, dim)
        layers = [_Layer(dim, heads, is_fused=True, has_bias=False) for _ in range(depth)]
        self.layers = nn.Sequential(*layers, nn.LayerNorm(dim, bias=False))

    def forward(self, tokens: Tensor) -> Tensor:
        return F.linear(self.layers(self.embed(tokens)), self.embed.weight)


def _tokens(batch_size: int, dtype: torch.dtype, *, length: int, vocabulary: int) -> tuple[Tensor, ...]:
    return (torch.randint(0, vocabulary, (batch_size, length)),)


def _decoder_loss(model: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
    (tokens,) = inputs
    scores = model(tokens)
    scores = scores if isinstance(scores, Tensor) else scores.logits
    return F.cross_entropy(scores.flatten(0, 1), tokens.roll(-1, 1).flatten())


def _span_loss(model: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
    (tokens,) = inputs
    ends = tokens[:, 0] % tokens.shape[1]
    out = model(input_ids=tokens)
    return F.cross_entropy(out.start_logits, ends) + F.cross_entropy(out.end_logits, ends)


def _bert(hidden: int, layers: int, heads: int) -> nn.Module:
    """BERT that answers questions, as it is fine-tuned on SQuAD."""
    from transformers import BertConfig, BertForQuestionAnswering

    config: Any = BertConfig(  # type: ignore[call-arg]
        hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, intermediate_size=4 * hidden,
        attn_implementation="eager",
    )  # fmt: skip
    return BertForQuestionAnswering(config)


def _gpt2() -> nn.Module:
    """GPT-2 with nanoGPT's settings of then: attention of products, no dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config: Any = GPT2Config(  # type: ignore[call-arg]
        attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, use_cache=False, attn_implementation="eager"
    )
    return GPT2LMHeadModel(config)


def _squad(hidden: int, layers: int, heads: int) -> Example:
    return Example(
        build=functools.partial(_bert, hidden, layers, heads),
        inputs=functools.partial(_tokens, length=384, vocabulary=30_522),
        loss=_span_loss,
        batch_size=1,
    )


def _decoder(build: Callable[[], nn.Module], length: int) -> Example:
    inputs = functools.partial(_tokens, length=length, vocabulary=50_257)
    return Example(build=build, inputs=inputs, loss=_decoder_loss, batch_size=1)


def _classifier(build: Callable[[], nn.Module]) -> Example:
    return image_example(build, 1)


MODELS: dict[str, Example] = {
    "alexnet-owt": _classifier(_alexnet_owt),
    "vgg11": _classifier(_vgg11),
    "vgg16": _classifier(plain.vgg16),
    "vgg16-bn": _classifier(plain.vgg16_bn),
    "vgg19": _classifier(plain.vgg19),
    "resnet18": _classifier(functools.partial(ResNet, (2, 2, 2, 2), bottleneck=False)),
    "resnet34": _classifier(functools.partial(ResNet, (3, 4, 6, 3), bottleneck=False)),
    "resnet50": _classifier(residual.resnet50),
    "resnet101": _classifier(residual.resnet101),
    "resnet152": _classifier(residual.resnet152),
    "wide-resnet50-2": _classifier(functools.partial(_bottleneck_resnet, 128, 1)),
    "resnext50-32x4d": _classifier(functools.partial(_bottleneck_resnet, 128, 32)),
    "densenet121": _classifier(_densenet121),
    "mobilenetv2": _classifier(_mobilenetv2),
    "convnext-tiny": _classifier(_convnext_tiny),
    "mixer-b16": _classifier(_Mixer),
    "vit-s16": _classifier(functools.partial(_ViT, 384, 12, 6)),
    "vit-b16": _classifier(functools.partial(_ViT, 768, 12, 12)),
    "vit-l16": _classifier(functools.partial(_ViT, 1024, 24, 16)),
    "bert-base-squad": _squad(768, 12, 12),
    "bert-large-squad": _squad(1024, 24, 16),
    "gpt2-nanogpt": _decoder(_gpt2, 1024),
    "mpt-125m": _decoder(functools.partial(_Decoder, 768, 12, 12), 2048),
    "mpt-350m": _decoder(functools.partial(_Decoder, 1024, 24, 16), 2048),
    "mpt-760m": _decoder(functools.partial(_Decoder, 1536, 24, 12), 2048),
    "mpt-1b": _decoder(functools.partial(_Decoder, 2048, 24, 16), 2048),
}
"""By name."""
