"""The jobs of the contests: a small GPT-2 on the sources of Python's standard library. One sample in five is held out.

They end at losses that the configured size takes some ten minutes to, so that tuning is a few per cent of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.tuner.contests import Contest
from benchmarks.tuner.jobs import Job, Tensors
from benchmarks.tuner.text import MODULES, NUM_BYTES, sequences
from examples.models import gpt2

__all__ = ["contests", "quick_contests"]

_ONE_IN = 5
_GIVE_UP_SECONDS = 1800.0


def contests() -> tuple[Contest, ...]:
    """The contests whose figures count: configured far too small, and configured as the best of that one's grid."""
    shape: dict[str, Any] = {"layers": 2, "width": 64, "length": 64, "window": 4096, "num_race_samples": 1_600_000}
    return (
        _text(
            "gpt2-small-batch", batch_size=2, lr=7e-4, target_loss=1.77,
            sizes=(8, 16, 32, 64), rate_factors=(1.0, 2.0), seeds=(0,), **shape,
        ),
        _text(
            "gpt2-good-batch", batch_size=16, lr=2e-3, target_loss=1.58, sizes=(), rate_factors=(), seeds=(0,), **shape
        ),
    )  # fmt: skip


def quick_contests() -> tuple[Contest, ...]:
    """Tiny ones, which take seconds."""
    shape: dict[str, Any] = {
        "layers": 1, "width": 16, "length": 16, "window": 32, "modules": ("textwrap",), "batch_size": 4, "lr": 1e-3,
        "rate_factors": (1.0,), "seeds": (0,),
    }  # fmt: skip
    return (
        _text("gpt2-small-batch", sizes=(4, 8), target_loss=5.0, num_race_samples=2_000, **shape),
        _text("gpt2-good-batch", sizes=(4,), target_loss=5.4, num_race_samples=256, **shape),
    )


def _text(
    key: str,
    *,
    layers: int,
    width: int,
    length: int,
    batch_size: int,
    lr: float,
    target_loss: float,
    num_race_samples: int,
    window: int,
    sizes: tuple[int, ...],
    rate_factors: tuple[float, ...],
    seeds: tuple[int, ...],
    modules: tuple[str, ...] = MODULES,
) -> Contest:
    def network() -> nn.Module:
        model: Any = gpt2(layers=layers, width=width, heads=max(1, width // 32), attention_dropout=0.0)
        model.resize_token_embeddings(NUM_BYTES)
        network: nn.Module = model
        return network

    def tensors(*, is_held_out: bool) -> Tensors:
        samples = sequences(length, modules)
        return (samples[(torch.arange(len(samples)) % _ONE_IN == 0) == is_held_out],)

    job = Job(
        key=key,
        title=f"GPT-2 of {layers} layers, width {width}, from {batch_size} sequences",
        network=network,
        loss=_next_byte_loss,
        tensors=lambda: tensors(is_held_out=False),
        optimizer=lambda parameters, lr: torch.optim.AdamW(parameters, lr=lr),
        batch_size=batch_size,
        lr=lr,
        lr_scaling="sqrt",
        plain_size=batch_size,
        target_loss=target_loss,
        window=window,
        num_race_samples=num_race_samples,
        sizes={"layers": layers, "width": width, "length": length, "vocabulary": NUM_BYTES, "optimizer": "AdamW"},
    )
    return Contest(
        job=job, held_out=lambda: tensors(is_held_out=True), error=_next_byte_error, error_name="held_out_loss",
        sizes=sizes, rate_factors=rate_factors, give_up_seconds=_GIVE_UP_SECONDS, seeds=seeds,
    )  # fmt: skip


def _next_byte_loss(network: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    (tokens,) = batch
    logits = network(input_ids=tokens).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def _next_byte_error(network: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    return _next_byte_loss(network, batch) * len(batch[0])
