"""A small model with every kind of state, the whole state that a fit leaves, and a clock that only it moves."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import torchmetrics
from lightning.pytorch.loggers.logger import Logger
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

import lightning_offload as lo
from lightning_offload.callbacks.tuning.options import AdvancedTuning
from lightning_offload.callbacks.tuning.trials import LoopWatch
from lightning_offload.tuning.snapshot import RandomStates

NUM_SAMPLES = 96
NUM_FEATURES = 6


_FEW = {"steps_per_trial": 2, "warmup_steps": 0}  # the clock has no noise
_PLAIN = {
    "lr_warmup_steps": 0,
    "max_data_share": 1.0,
    "max_lr_factor": 1000.0,
    "objective": "throughput",
    "max_seconds": 1e9,
}
"""So that a tuned run is that of the found size and rate from its first step on, whatever they are."""


class Clock:
    """Stands still until the model moves it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def constant(batch_size: int) -> float:
    """A step that takes as long at any size: the largest size is the best."""
    return 1.0


def saturating(batch_size: int) -> float:
    """A step whose throughput does not rise beyond 16 samples."""
    return max(16.0, batch_size) / 16


def samples(num_samples: int = NUM_SAMPLES) -> TensorDataset:
    """The same random samples at every call."""
    generator = torch.Generator().manual_seed(7)
    features = torch.randn(num_samples, NUM_FEATURES, generator=generator)
    return TensorDataset(features, torch.randint(0, 3, (num_samples,), generator=generator))


class Net(pl.LightningModule):
    """Batch norm, dropout, a buffer that no checkpoint has, a metric, a list, and every library's random numbers."""

    def __init__(
        self,
        batch_size: int = 4,
        lr: float = 0.01,
        scheduler: str = "onecycle",
        clock: Clock | None = None,
        seconds: Callable[[int], float] = constant,
    ) -> None:
        super().__init__()
        self.save_hyperparameters("batch_size", "lr")
        self.batch_size = batch_size
        self.lr = lr
        self.scheduler = scheduler
        torch.manual_seed(2)  # the same weights in every one
        self.stem = nn.Sequential(
            nn.Linear(NUM_FEATURES, 8), nn.BatchNorm1d(8, momentum=0.3), nn.ReLU(), nn.Dropout(0.3)
        )
        self.head = nn.Linear(8, 3)
        self.register_buffer("seen", torch.zeros(2), persistent=False)
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(num_classes=3)
        self.losses: list[float] = []
        self.generator = torch.Generator().manual_seed(3)
        self.sizes: list[int] = []
        self.average = {"loss": 0.0}
        self._clock, self._seconds = clock, seconds

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        features, labels = batch
        noise = random.random() + np.random.rand() + torch.rand((), generator=self.generator).item()  # noqa: NPY002
        output = self.head(self.stem(features + 0.01 * noise))
        loss = nn.functional.cross_entropy(output.float(), labels)
        self.seen = self.seen + torch.tensor([1.0, float(len(features))])
        self.accuracy.update(output.float(), labels)
        self.losses.append(loss.item())
        self.sizes.append(len(features))
        self.average["loss"] += loss.item()
        self.log("loss", loss)
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        if self._clock is not None:
            self._clock.now += self._seconds(len(features))
        return loss

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(samples(), self.batch_size, shuffle=True)

    def configure_optimizers(self) -> Any:
        groups = [
            {"params": self.stem.parameters(), "lr": self.lr},
            {"params": self.head.parameters(), "lr": self.lr / 2},
        ]
        optimizer = torch.optim.AdamW(groups)
        schedule = torch.optim.lr_scheduler
        if self.scheduler == "onecycle":
            total = self.trainer.estimated_stepping_batches
            made: Any = schedule.OneCycleLR(optimizer, [self.lr, self.lr / 2], total_steps=total)
        elif self.scheduler == "cosine":
            made = schedule.CosineAnnealingLR(optimizer, T_max=self.trainer.estimated_stepping_batches)
        else:
            made = schedule.StepLR(optimizer, step_size=2, gamma=0.999)  # which hardly ends it elsewhere
        interval = "epoch" if self.scheduler == "epochs" else "step"
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": made, "interval": interval}}


def is_trial(module: Any) -> bool:
    """Whether a step of a model is one of a trial, or of a pilot."""
    return any(isinstance(each, LoopWatch) for each in module.trainer.callbacks)


class MemoryLogger(Logger):
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.logged: list[Any] = []
        self.hyperparameters: list[Any] = []

    @property
    def name(self) -> str:
        return "memory"

    @property
    def version(self) -> str:
        return "0"

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.logged.append((step, dict(metrics)))

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        self.hyperparameters.append(dict(params))


class Reader(pl.Callback):
    """Notes every call of a hook, and the whole state at the end of training."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.state: dict[str, Any] = {}

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.calls.append("on_fit_start")

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, index: int) -> None:
        self.calls.append(f"batch {index} of {len(batch[0])}")

    def on_before_zero_grad(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        self.calls.append("zero_grad")

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.state = state_of(trainer, pl_module)


def state_of(trainer: pl.Trainer, module: Any) -> dict[str, Any]:
    """All state of a training that the next step depends on."""
    states = RandomStates.now()
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    metric = module.accuracy
    return {
        "parameters": {name: value.detach().clone() for name, value in module.named_parameters()},
        "buffers": {name: value.clone() for name, value in module.named_buffers()},
        "optimizers": [optimizer.state_dict() for optimizer in trainer.optimizers],
        "schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
        "scaler": None if scaler is None else scaler.state_dict(),
        "rng": (
            states.python,
            states.numpy[1].tolist(),
            states.numpy[2],
            states.torch_devices[0],
            module.generator.get_state(),
        ),
        "loops": trainer.fit_loop.state_dict(),
        "metric": (metric.metric_state, metric._update_count),
        "plain": (module.losses, module.sizes, module.average, module.batch_size, module.lr),
        "steps": (trainer.global_step, trainer.current_epoch, trainer.num_training_batches),
        "rates": [[group["lr"] for group in optimizer.param_groups] for optimizer in trainer.optimizers],
        "modes": [part.training for part in module.modules()],
    }


def fitted(trainer: pl.Trainer, module: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Fit from fixed seeds and return all that came of it."""
    reader, logger = Reader(), MemoryLogger()
    trainer.callbacks.append(reader)
    trainer.loggers = [logger]
    pl.seed_everything(5, verbose=False)
    trainer.fit(module, *args, **kwargs)
    return {**reader.state, "calls": reader.calls, "logged": logger.logged, "hparams": logger.hyperparameters}


def with_advanced(keywords: dict[str, Any]) -> dict[str, Any]:
    """The keywords of a finder, those of its advanced record among them put there."""
    names = {field.name for field in dataclasses.fields(AdvancedTuning)}
    own = {name: value for name, value in keywords.items() if name not in names}
    return {**own, "advanced": {name: value for name, value in keywords.items() if name in names}}


def finder_of(clock: Clock | None = None, **kwargs: Any) -> Any:
    """A finder that sees the time of `clock`."""
    keywords = {"max_val": 16, "lr_scaling": "sqrt", "on_failure": "raise", **_FEW, **_PLAIN, **kwargs}
    finder = lo.EfficientBatchSizeFinder(**with_advanced(keywords))
    if clock is not None:
        finder._clock = clock
    return finder


def assert_same(ours: Any, plain: Any, path: str = "") -> None:
    """Fails unless the two states are equal bit for bit."""
    if isinstance(plain, Tensor):
        assert isinstance(ours, Tensor), path
        ours, plain = (each.to_local() if isinstance(each, DTensor) else each for each in (ours, plain))
        assert ours.dtype == plain.dtype, f"{path}: {ours.dtype} instead of {plain.dtype}"
        same = ours.contiguous().view(-1).view(torch.uint8).equal(plain.contiguous().view(-1).view(torch.uint8))
        assert same, f"{path} differs"
    elif isinstance(plain, dict):
        assert list(ours) == list(plain), path
        for key, value in plain.items():
            assert_same(ours[key], value, f"{path}.{key}")
    elif isinstance(plain, (list, tuple)):
        assert len(ours) == len(plain), f"{path}: {len(ours)} items instead of {len(plain)}"
        for index, value in enumerate(plain):
            assert_same(ours[index], value, f"{path}[{index}]")
    elif not callable(plain):
        assert ours == plain, f"{path}: {ours!r} instead of {plain!r}"
