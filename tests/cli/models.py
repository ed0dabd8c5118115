"""What a command line may name: modules, what makes them, and what does not."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn


def small() -> nn.Module:
    """A convolutional net."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Flatten(), nn.Linear(8 * 32 * 32, 10),
    )  # fmt: skip


def deep() -> nn.Module:
    """Sixty layers with something to save each, and as many without."""
    return nn.Sequential(
        OrderedDict(layers=nn.Sequential(*(m for _ in range(60) for m in (nn.Linear(32, 32), nn.Tanh()))))
    )


class Tied(nn.Module):
    """A language model whose head is its embedding; with a part that is never used and one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embedding.weight
        self.unused = nn.Linear(64, 64)
        self.scale = nn.Parameter(torch.ones(16), requires_grad=False)
        self.register_buffer("offset", torch.zeros(16))

    def forward(self, ids: Tensor) -> Tensor:
        hidden = torch.tanh(self.embedding(ids) * self.scale + self.offset)
        logits: Tensor = self.head(hidden)
        return logits


class Speaker(nn.Module):
    """A language model with a large vocabulary, which gives its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4096, 32)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(3)))
        self.head = nn.Linear(32, 4096, bias=False)

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.layers(self.embedding(ids)))
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), ids.roll(-1, 1).flatten())}


def speaker() -> nn.Module:
    return Speaker()


INSTANCE = Tied()
NUMBER = 7


class Container:
    """Holds a model."""

    net = small


def with_arguments(width: int, *, depth: int) -> nn.Module:
    return nn.Linear(width, depth)


def broken() -> nn.Module:
    raise ValueError("no\nsuch luck")


def no_model() -> dict[str, Any]:
    return {}


class Heads(nn.Module):
    """Returns two outputs, one that cannot be differentiated."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 4)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> dict[str, Tensor]:
        y = self.linear(x)
        return {"scores": y if mask is None else y * mask, "best": y.argmax(-1)}


class Detached(nn.Module):
    """Learns nothing."""

    def forward(self, x: Tensor) -> Tensor:
        return x


class Classifier(pl.LightningModule):
    """A LightningModule with labels."""

    def __init__(self) -> None:
        super().__init__()
        self.net = small()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Tensor]:
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("loss", loss)
        return {"loss": loss}


class Configured(Classifier):
    """The same with an optimizer and a schedule, and a training step that takes no index."""

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:  # type: ignore[override]
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters())
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}


class NeedsTrainer(Classifier):
    """The same with an optimizer that asks a Trainer for something."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1 / self.trainer.max_steps)


def gpt2() -> nn.Module:
    from tests.zoo.models import hugging_face

    return hugging_face.gpt2("sdpa")


def two_inputs(batch_size: int) -> dict[str, Tensor]:
    """Real tensors for :class:`Heads`."""
    return {"x": torch.zeros(batch_size, 16), "mask": torch.ones(batch_size, 4)}


def one_input(batch_size: int) -> Tensor:
    return torch.zeros(batch_size, 3, 32, 32)
