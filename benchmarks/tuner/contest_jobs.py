"""The jobs of the contests: small enough for forty minutes on two cores, and named by their sizes.

Digits by a perceptron whose inputs get noise in training, with SGD and with AdamW; a ResNet-50 an eighth as wide as
the usual one on the same digits; a GPT-2 of two layers on the sources of Python's standard library. One sample in five
is held out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.tuner.contests import Contest
from benchmarks.tuner.jobs import Job, Tensors
from benchmarks.tuner.text import MODULES, NUM_BYTES, sequences
from examples.demo.data import NUM_CLASSES, load_images
from examples.models import ResNet, gpt2

__all__ = ["contests", "quick_contests"]

_ONE_IN = 5
_SEEDS = (0, 1, 2, 3, 4)
_FACTORS = (0.5, 1.0, 2.0)
_GIVE_UP_SECONDS = 150.0
_Optimizer = Callable[[Any, float], torch.optim.Optimizer]


class _Noise(nn.Module):
    """Adds noise of a deviation while training, so that a few samples are not learned by heart."""

    def __init__(self, deviation: float) -> None:
        super().__init__()
        self._deviation = deviation

    def forward(self, samples: Tensor) -> Tensor:
        return samples + self._deviation * torch.randn_like(samples) if self.training else samples


def contests() -> tuple[Contest, ...]:
    """The contests whose figures count."""
    sizes = (4, 8, 16, 32, 64, 128, 256)
    return (
        _digits("SGD", sizes=sizes, batch_size=8, lr=0.003, target_loss=0.25),
        _digits("AdamW", sizes=sizes, batch_size=8, lr=0.0003, target_loss=0.25),
        _resnet(sizes=sizes, width=8, image_size=16, batch_size=16, target_loss=0.1, num_race_samples=160_000),
        _text(
            sizes=(1, 2, 4, 8, 16, 32, 64),
            layers=2,
            width=64,
            length=64,
            target_loss=2.1,
            num_race_samples=40_000,
        ),
    )


def quick_contests() -> tuple[Contest, ...]:
    """Tiny ones, which take seconds."""
    few: dict[str, Any] = {"rate_factors": (1.0,), "seeds": (0,), "window": 32}
    return (
        _digits(
            "SGD", sizes=(8, 32), batch_size=8, lr=0.01, target_loss=1.5, width=16, num_race_samples=2_000, **few
        ),
        _text(
            sizes=(4,), layers=1, width=16, length=16, target_loss=5.4, num_race_samples=256, modules=("textwrap",),
            **few,
        ),
    )  # fmt: skip


def _contest(
    job: Job,
    held_out: Callable[[], Tensors],
    *,
    is_language: bool,
    sizes: tuple[int, ...],
    rate_factors: tuple[float, ...] = _FACTORS,
    seeds: tuple[int, ...] = _SEEDS,
    num_repeats: int = 1,
) -> Contest:
    return Contest(
        job=job, held_out=held_out, error=_next_byte_error if is_language else _num_wrong,
        error_name="held_out_loss" if is_language else "held_out_wrong_share", sizes=sizes, rate_factors=rate_factors,
        give_up_seconds=_GIVE_UP_SECONDS, seeds=seeds, num_repeats=num_repeats,
    )  # fmt: skip


def _digits(
    name: Literal["SGD", "AdamW"],
    *,
    batch_size: int,
    lr: float,
    target_loss: float,
    width: int = 256,
    deviation: float = 1.0,
    window: int = 1024,
    num_race_samples: int = 4_000_000,
    **grid: Any,
) -> Contest:
    """The run is configured to be long, as one that ends at a loss is."""
    job = Job(
        key=f"digits-{name.lower()}",
        title=f"a perceptron on digits, {name}",
        network=lambda: nn.Sequential(
            _Noise(deviation), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(),
            nn.Linear(width, NUM_CLASSES),
        ),
        loss=_cross_entropy,
        tensors=lambda: _split(_flat_images(), is_held_out=False),
        optimizer=_sgd if name == "SGD" else _adamw,
        batch_size=batch_size,
        lr=lr,
        lr_scaling="linear" if name == "SGD" else "sqrt",
        plain_size=batch_size,
        target_loss=target_loss,
        window=window,
        num_race_samples=num_race_samples,
        sizes={"width": width, "layers": 3, "noise": deviation, "optimizer": name},
    )  # fmt: skip
    return _contest(job, lambda: _split(_flat_images(), is_held_out=True), is_language=False, **grid)


def _resnet(
    *, width: int, image_size: int, batch_size: int, target_loss: float, num_race_samples: int, **grid: Any
) -> Contest:
    blocks = (3, 4, 6, 3)
    images = partial(load_images, image_size)
    job = Job(
        key="resnet50-narrow",
        title=f"ResNet-50 of width {width} on digits",
        network=lambda: ResNet(blocks, num_classes=NUM_CLASSES, width=width),
        loss=_cross_entropy,
        tensors=lambda: _split(images(), is_held_out=False),
        optimizer=_sgd,
        batch_size=batch_size,
        lr=0.001,
        lr_scaling="linear",
        plain_size=batch_size,
        target_loss=target_loss,
        window=512,
        num_race_samples=num_race_samples,
        sizes={"image_size": image_size, "width": width, "blocks": list(blocks), "optimizer": "SGD, momentum 0.9"},
    )
    return _contest(job, lambda: _split(images(), is_held_out=True), is_language=False, **grid)


def _text(
    *,
    layers: int,
    width: int,
    length: int,
    target_loss: float,
    num_race_samples: int,
    window: int = 512,
    modules: tuple[str, ...] = MODULES,
    **grid: Any,
) -> Contest:
    def network() -> nn.Module:
        model: Any = gpt2(layers=layers, width=width, heads=max(1, width // 32), attention_dropout=0.0)
        model.resize_token_embeddings(NUM_BYTES)
        network: nn.Module = model
        return network

    job = Job(
        key="gpt2-small",
        title=f"GPT-2 of {layers} layers, width {width}, on Python's sources",
        network=network,
        loss=_next_byte_loss,
        tensors=lambda: _split((sequences(length, modules),), is_held_out=False),
        optimizer=_adamw,
        batch_size=4,
        lr=1e-3,
        lr_scaling="sqrt",
        plain_size=4,
        target_loss=target_loss,
        window=window,
        num_race_samples=num_race_samples,
        sizes={"layers": layers, "width": width, "length": length, "vocabulary": NUM_BYTES, "optimizer": "AdamW"},
    )
    return _contest(job, lambda: _split((sequences(length, modules),), is_held_out=True), is_language=True, **grid)


def _flat_images() -> Tensors:
    images, labels = load_images(8)
    return images[:, 0].flatten(1).contiguous(), labels


def _split(tensors: Tensors, *, is_held_out: bool) -> Tensors:
    """Every fifth sample, or the others."""
    number = torch.arange(len(tensors[0]))
    return tuple(tensor[(number % _ONE_IN == 0) == is_held_out] for tensor in tensors)


def _sgd(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9)


def _adamw(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=lr)


def _cross_entropy(network: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    return F.cross_entropy(network(batch[0]), batch[1])


def _num_wrong(network: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    predicted: Tensor = network(batch[0]).argmax(dim=1)
    return (predicted != batch[1]).sum()


def _next_byte_loss(network: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    (tokens,) = batch
    logits = network(input_ids=tokens).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def _next_byte_error(network: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    return _next_byte_loss(network, batch) * len(batch[0])
