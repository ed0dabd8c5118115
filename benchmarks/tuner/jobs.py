"""What the tuner is tried on: two models with data that are there without a download, as ordinary Lightning code.

A job's budget is the peak of its plain step at `plain_size`: as on a device where training without a memory plan ends
at that batch size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import lightning.pytorch as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.tuner.text import MODULES, NUM_BYTES, sequences
from examples.demo.data import NUM_CLASSES, load_images, make_loader
from examples.models import ResNet, gpt2

__all__ = ["Data", "Job", "Model", "jobs", "quick_jobs"]

Tensors = tuple[Tensor, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A training whose batch size is to be found.

    Attributes:
        key: Short name, for files.
        title: Name for people.
        network: Makes the model, with random weights.
        loss: Of the model on a batch.
        tensors: Makes the data set: tensors with one row per sample.
        optimizer: Makes the optimizer of some parameters at a rate.
        batch_size: The configured size, the base that the found one is compared with.
        lr: The rate that goes with it.
        lr_scaling: How the rate follows the size.
        plain_size: The largest size whose plain step is to fit the budget.
        target_loss: Training loss that is raced for: a mean over the last `window` samples.
        window: Samples in that mean.
        num_race_samples: After how many samples a race is given up.
        sizes: What the figures depend on besides, ready for JSON.
    """

    key: str
    title: str
    network: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Sequence[Tensor]], Tensor]
    tensors: Callable[[], Tensors]
    optimizer: Callable[[Any, float], torch.optim.Optimizer]
    batch_size: int
    lr: float
    lr_scaling: Literal["linear", "sqrt", "none"]
    plain_size: int
    target_loss: float
    window: int
    num_race_samples: int
    sizes: dict[str, Any]

    def config(self) -> dict[str, Any]:
        """Sizes and settings, ready for JSON."""
        names = (
            "batch_size", "lr", "lr_scaling", "plain_size", "target_loss", "window", "num_race_samples",
        )  # fmt: skip
        return {**self.sizes, **{name: getattr(self, name) for name in names}}


class Model(L.LightningModule):
    """A job's network, loss and optimizer."""

    def __init__(self, job: Job, lr: float | None = None) -> None:
        super().__init__()
        self.lr = job.lr if lr is None else lr
        self.network = job.network()
        self._loss, self._optimizer = job.loss, job.optimizer

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        """Return the loss of a batch."""
        return self._loss(self.network, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the job's optimizer."""
        return self._optimizer(self.parameters(), self.lr)


class Data(L.LightningDataModule):
    """A job's samples, shuffled the same way for the same seed, in batches of a size."""

    def __init__(self, job: Job, batch_size: int | None = None, seed: int = 0) -> None:
        super().__init__()
        self.batch_size = job.batch_size if batch_size is None else batch_size
        self._tensors, self._seed = job.tensors(), seed

    def train_dataloader(self) -> DataLoader[Tensors]:
        """Return a loader of whole batches."""
        first, *others = self._tensors
        if others:
            return make_loader(first, others[0], batch_size=self.batch_size, seed=self._seed)
        generator = torch.Generator().manual_seed(self._seed)
        return DataLoader(TensorDataset(first), self.batch_size, shuffle=True, drop_last=True, generator=generator)


def jobs() -> tuple[Job, ...]:
    """The jobs whose figures count."""
    return (
        _digits(width=64, image_size=32, batch_size=16, plain_size=32, target_loss=0.5, num_race_samples=12_000),
        _text(
            layers=4, width=128, length=64, batch_size=4, plain_size=16, target_loss=2.4, num_race_samples=16_000,
            window=512,
        ),
    )  # fmt: skip


def quick_jobs() -> tuple[Job, ...]:
    """Tiny ones, which take seconds."""
    return (
        _digits(
            width=4, blocks=(1, 1), image_size=16, batch_size=4, plain_size=16, target_loss=2.3, num_race_samples=512,
            window=32, num_samples=256,
        ),
        _text(
            layers=1, width=16, length=16, batch_size=4, plain_size=16, target_loss=5.4, num_race_samples=512,
            window=32, num_samples=256, modules=("textwrap",),
        ),
    )  # fmt: skip


def _digits(
    *,
    width: int,
    image_size: int,
    batch_size: int,
    blocks: tuple[int, ...] = (3, 4, 6, 3),
    window: int = 512,
    num_samples: int | None = None,
    **settings: Any,
) -> Job:
    """The demo's network and data; at a rate above this one its first steps at a small size overshoot."""
    return Job(
        key="resnet50",
        title="ResNet-50 on digits",
        network=lambda: ResNet(blocks, num_classes=NUM_CLASSES, width=width),
        loss=lambda network, batch: F.cross_entropy(network(batch[0]), batch[1]),
        tensors=lambda: load_images(image_size, num_samples),
        optimizer=lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=0.9),
        batch_size=batch_size,
        lr=0.001,
        lr_scaling="linear",
        window=window,
        sizes={"image_size": image_size, "width": width, "blocks": list(blocks), "optimizer": "SGD, momentum 0.9"},
        **settings,
    )


def _text(
    *,
    layers: int,
    width: int,
    length: int,
    batch_size: int,
    window: int,
    modules: tuple[str, ...] = MODULES,
    num_samples: int | None = None,
    **settings: Any,
) -> Job:
    """A GPT-2 whose tokens are bytes."""

    def network() -> nn.Module:
        # without dropout on attention's weights, the fused kernel runs
        model: Any = gpt2(layers=layers, width=width, heads=max(1, width // 64), attention_dropout=0.0)
        model.resize_token_embeddings(NUM_BYTES)
        network: nn.Module = model
        return network

    return Job(
        key="gpt2",
        title="GPT-2 on Python's sources",
        network=network,
        loss=_next_byte_loss,
        tensors=lambda: (sequences(length, modules)[:num_samples],),
        optimizer=lambda parameters, lr: torch.optim.AdamW(parameters, lr=lr),
        batch_size=batch_size,
        lr=1e-3,
        lr_scaling="sqrt",
        window=window,
        sizes={"layers": layers, "width": width, "length": length, "vocabulary": NUM_BYTES, "optimizer": "AdamW"},
        **settings,
    )


def _next_byte_loss(network: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    (tokens,) = batch
    logits = network(input_ids=tokens).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
