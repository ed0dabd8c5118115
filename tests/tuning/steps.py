"""Steps at many batch sizes: made up by laws that are known, or recorded without running."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from examples.models.registry import MODELS, Example
from lightning_offload.graph import StepGraph
from lightning_offload.graph.catalog import device_spec
from lightning_offload.plugins.fake import FakeStep, record_fake
from tests.zoo.models.sequence import RecurrentLM

A100 = device_spec("a100", dtype="float32")
H200 = device_spec("h200", dtype="bfloat16")

Family = Callable[[int], StepGraph]
"""A step at any batch size."""


def linear_family(like: StepGraph, rng: random.Random, *, num_parts: int = 1) -> Family:
    """Steps of one structure whose storages, workspaces and durations are all ``a + b*n``.

    ``b`` is a whole number of ``num_parts``-ths of a byte, so that with 1 everything is a whole number of bytes.
    """

    def law() -> tuple[int, int]:
        return rng.choice([0, 7, 1000, 10**9]) + rng.randint(0, 99), rng.choice([0, 0, 1, 3, 4096, 10**6])

    storages = [law() for _ in like.storages]
    workspaces = [law() for _ in like.ops]
    seconds = [(rng.choice([0.0, 0.5, 2.0]), rng.choice([0.0, 0.25, 1e-3])) for _ in like.ops]

    def at(n: int) -> StepGraph:
        return dataclasses.replace(
            like,
            storages=tuple(
                dataclasses.replace(s, num_bytes=a + -(-b * n // num_parts))
                for s, (a, b) in zip(like.storages, storages, strict=True)
            ),
            ops=tuple(
                dataclasses.replace(op, workspace_bytes=a + -(-b * n // num_parts), seconds=c + d * n)
                for op, (a, b), (c, d) in zip(like.ops, workspaces, seconds, strict=True)
            ),
        )

    return at


def untimed(graph: StepGraph) -> StepGraph:
    """The step without its durations."""
    return dataclasses.replace(graph, ops=tuple(dataclasses.replace(op, seconds=0.0) for op in graph.ops))


@functools.cache
def recorded(model: str, batch_size: int) -> FakeStep:
    """A step of one of the models that is recorded without running."""
    example = _OWN[model] if model in _OWN else MODELS[model]
    return record_fake(example.step(batch_size))


def recorded_family(model: str, device: str = "a100") -> Family:
    """The model's steps, timed for a device."""
    spec = {"a100": A100, "h200": H200}[device]
    return lambda n: recorded(model, n).on(spec)


class SimCLR(nn.Module):
    """A contrastive loss compares each sample with each other one (Chen et al., arXiv:2002.05709)."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(96, 256), nn.ReLU(), nn.Linear(256, 64))

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        """Return the similarities of all pairs of views."""
        a, b = (functional.normalize(self.encoder(x), dim=1) for x in (first, second))
        scores: Tensor = a @ b.t() / 0.1
        return scores


def _tokens(n: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    return (torch.randint(0, 64, (n, 14)),)


def _token_loss(model: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
    scores = model(inputs[0][:, :-1])
    return functional.cross_entropy(scores.flatten(0, 1), inputs[0][:, 1:].flatten())


def _views(n: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    return torch.randn(n, 96), torch.randn(n, 96), torch.arange(n)


def _pair_loss(model: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
    return functional.cross_entropy(model(*inputs[:2]), inputs[2])


_OWN = {
    "lstm": Example(build=lambda: RecurrentLM("lstm"), inputs=_tokens, loss=_token_loss, batch_size=8),
    "simclr": Example(build=SimCLR, inputs=_views, loss=_pair_loss, batch_size=8),
}
