"""Training whose ops change from step to step under one shape: exact, under a plan, within the budget."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_offload import MemoryPlugin
from tests.engine.live_tracker import LiveStorageTracker
from tests.shares import is_all, pairs
from tests.zoo.models import hugging_face

NUM_STEPS, NUM_STEPS_PADDED = 50 if is_all() else 32, 50
"""Where sizes change, too, a plan needs more to learn from."""

NUM_LEARNING = 20
"""From there on nine steps of ten are to be planned."""

Batch = dict[str, Tensor]
WIDTH = 64


class Block(nn.Module):
    """Attention and a feed-forward part."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, 3 * WIDTH)
        self.feed = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        """One residual block."""
        query, key, value = self.mix(self.norm(x)).chunk(3, -1)
        x = x + torch.softmax(query @ key.transpose(1, 2), -1) @ value
        out: Tensor = x + self.feed(x)
        return out


class Stack(nn.Module):
    """Blocks between an embedding and a head of its own kind.

    Args:
        depth: How many blocks there are.
        drop: How probable it is that one is left out.
        exits: Whether some steps end early.
        regularised: Every so many steps what is noisy is to look like what is not; 0 for never.
        evaluates: Every so many steps the model is evaluated within the step; 0 for never.
    """

    def __init__(
        self, depth: int = 6, drop: float = 0.0, *, exits: bool = False, regularised: int = 0, evaluates: int = 0
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(96, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(WIDTH, 96)
        self.drop, self.exits, self.regularised, self.evaluates = drop, exits, regularised, evaluates
        self.step = 0

    def features(self, x: Tensor) -> Tensor:
        """What the blocks make of an embedded text."""
        dropped = torch.rand(len(self.blocks)).lt(self.drop).tolist() if self.drop else [False] * len(self.blocks)
        depth = int(torch.randint(len(self.blocks) // 2, len(self.blocks) + 1, ())) if self.exits else len(self.blocks)
        for block, is_dropped in zip(self.blocks[:depth], dropped, strict=False):
            if not is_dropped:
                x = block(x)
        return x

    def forward(self, input_ids: Tensor) -> Tensor:
        """The loss of predicting each token from itself."""
        self.step += 1
        x = self.embedding(input_ids)
        loss = nn.functional.cross_entropy(self.head(self.features(x)).flatten(0, 1), input_ids.flatten())
        if self.regularised and self.step % self.regularised == 0:
            loss = loss + (self.features(x + 0.1 * torch.randn_like(x)) - x).square().mean()
        if self.evaluates and self.step % self.evaluates == 0:
            with torch.no_grad():
                mean = self.features(x).mean()
            loss = loss * (1 + 1e-9 * mean)
        return loss


class Adversaries(nn.Module):
    """A generator and a discriminator that take turns, with inputs of one shape."""

    def __init__(self, turns: tuple[bool, ...]) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            nn.Linear(WIDTH, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, WIDTH)
        )
        self.discriminator = nn.Sequential(
            nn.Linear(WIDTH, 192), nn.Tanh(), nn.Linear(192, 192), nn.Tanh(), nn.Linear(192, 1)
        )
        self.turns, self.step = turns, 0

    def forward(self, x: Tensor) -> Tensor:
        """The loss of whose turn it is."""
        is_generator = self.turns[self.step % len(self.turns)]
        self.step += 1
        made = self.generator(x.flip(0))
        if is_generator:
            return nn.functional.softplus(-self.discriminator(made)).mean()
        told = self.discriminator(x), self.discriminator(made.detach())
        return nn.functional.softplus(-told[0]).mean() + nn.functional.softplus(told[1]).mean()


def _text(batch: int = 4, length: int = 48) -> Batch:
    return {"input_ids": torch.randint(1, 96, (batch, length))}


def _labelled(batch: int = 4, length: int = 48) -> Batch:
    tokens = torch.randint(1, 96, (batch, length))
    return {"input_ids": tokens, "labels": tokens}


def _length(longest: int) -> int:
    return int(torch.randint(longest // 8, longest + 1, ()))


def _speech() -> Batch:
    return {"input_values": torch.randn(2, _length(8000)), "labels": torch.randint(1, 30, (2, 6))}


JOBS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Batch]]] = {
    "drop": (lambda: Stack(drop=0.2), _text),
    "exits": (lambda: Stack(exits=True), _text),
    "regularised": (lambda: Stack(regularised=4), _text),
    "evaluates": (lambda: Stack(evaluates=3), _text),
    "adversaries": (lambda: Adversaries((True, False)), lambda: {"x": torch.randn(512, WIDTH)}),
    "turns": (lambda: Adversaries((True, False, False)), lambda: {"x": torch.randn(512, WIDTH)}),
    "mixtral": (hugging_face.mixtral, _labelled),
    "olmoe": (hugging_face.olmoe, lambda: _labelled(8, 96)),
    "wav2vec2": (
        hugging_face.wav2vec2,
        lambda: {"input_values": torch.randn(2, 6000), "labels": torch.randint(1, 30, (2, 12))},
    ),
    "whisper": (
        hugging_face.whisper,
        lambda: {"input_features": torch.randn(2, 16, 128), "labels": torch.randint(1, 90, (2, 24))},
    ),
    "drop, padded": (lambda: Stack(drop=0.2), lambda: _text(length=_length(96))),
    "exits, padded": (lambda: Stack(exits=True), lambda: _text(_length(8), _length(96))),
    "mixtral, padded": (hugging_face.mixtral, lambda: _labelled(length=_length(64))),
    "olmoe, padded": (hugging_face.olmoe, lambda: _labelled(8, _length(96))),
    "wav2vec2, padded": (hugging_face.wav2vec2, _speech),
    "whisper, padded": (
        hugging_face.whisper,
        lambda: {"input_features": torch.randn(2, 16, 128), "labels": torch.randint(1, 90, (2, _length(32)))},
    ),
}
"""A model and its batches."""

REPEATED = {"olmoe", "whisper, padded", "mixtral, padded", "olmoe, padded", "wav2vec2, padded"}
"""Those that take long and whose twin, with or without padding or of the same kind, shows what they do."""


def _loss(model: nn.Module, batch: Batch) -> Tensor:
    out: Any = model(**batch)
    return out if isinstance(out, Tensor) else out.loss


class Trained:
    """What a training left and showed."""

    def __init__(
        self, name: str, memory: MemoryPlugin | None = None, num_steps: int = NUM_STEPS, *, forgets: bool = False
    ) -> None:
        build, make = JOBS[name]
        torch.manual_seed(3)
        model = build()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
        self.losses: list[float] = []
        self.phases: list[str] = []
        self.peaks: list[int] = []
        torch.manual_seed(4)
        with LiveStorageTracker() as tracker:
            for _ in range(num_steps):
                batch = make()
                tracker.register_all()
                with tracker.window() as window:
                    if memory is None:
                        loss = _loss(model, batch)
                        loss.backward()
                    else:
                        with memory.step(**batch):
                            loss = _loss(model, batch)
                            loss.backward()
                        self.phases.append(memory.report().phase)
                        if forgets:
                            memory.forget()
                self.peaks.append(window.peak_bytes)
                optimizer.step()
                optimizer.zero_grad()
                self.losses.append(loss.item())
                del batch, loss
        self.weights = [parameter.detach().clone() for parameter in model.parameters()]
        self.random = torch.get_rng_state()


def _same(one: Trained, other: Trained) -> bool:
    weights = all(torch.equal(a, b) for a, b in zip(one.weights, other.weights, strict=True))
    return weights and one.losses == other.losses and torch.equal(one.random, other.random)


def _budget(name: str, plain: Trained, height: float) -> int:
    """From the lowest peak that steps without a plan have (0) to the plain one (1)."""
    with MemoryPlugin(budget="64GiB") as memory:
        floor = max(Trained(name, memory, 12, forgets=True).peaks[1:])
    return int(floor + height * (max(plain.peaks) - floor))


@pytest.mark.parametrize(
    ("name", "height"), pairs([name for name in JOBS if is_all() or name not in REPEATED], [0.5, 0.2], every=3)
)
def test_steps_of_changing_structure_follow_a_plan(name: str, height: float) -> None:
    """Nine of ten from the twentieth on; within the budget from the tenth on; to the bit as without the plugin."""
    num_steps = NUM_STEPS_PADDED if "padded" in name else NUM_STEPS
    plain = Trained(name, num_steps=num_steps)
    budget = _budget(name, plain, height)
    with MemoryPlugin(budget=budget) as memory:
        trained = Trained(name, memory, num_steps)
    assert _same(plain, trained)
    assert max(trained.peaks[10:]) <= budget
    assert trained.phases[NUM_LEARNING:].count("planned") >= 0.9 * (num_steps - NUM_LEARNING)
