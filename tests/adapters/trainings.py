"""Trainings of one small net as frameworks run them, and as a command line names them; what each step of one shows."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from lightning_offload import MemoryPlugin, OffloadStrategy
from lightning_offload.accelerate import prepare_offload
from lightning_offload.transformers import OffloadCallback
from tests.engine.live_tracker import LiveStorageTracker, Window
from tests.lightning_runs import trainer_factory

NUM_STEPS = 6
BATCH_SIZE = 8
NUM_TOKENS = 32


def net() -> nn.Module:
    """Convolutions, batch norms, a residual sum in place, dropout and a head."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Dropout(0.1))

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.layers(x)
            y += x
            return y

    torch.manual_seed(1)
    blocks = (Block() for _ in range(4))
    return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), *blocks, nn.Flatten(), nn.Linear(16 * 256, 10))


class Lit(pl.LightningModule):
    """The net, trained with AdamW, which logs nothing."""

    logs = False
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        logits = self.net(batch[0])
        loss = nn.functional.cross_entropy(logits, batch[1])
        if self.logs:
            self.log("loss", loss, prog_bar=True, on_step=True, on_epoch=True)
            self.log("accuracy", (logits.argmax(-1) == batch[1]).float().mean())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer(self.parameters(), lr=1e-3)


class LitLogging(Lit):
    """The same, which logs."""

    logs = True


class LitSgd(Lit):
    """The net, trained with SGD and momentum."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-2, momentum=0.9)


class LitSgdLogging(LitSgd):
    """The same, which logs."""

    logs = True


def gpt2() -> GPT2LMHeadModel:
    """A tiny GPT-2 with random weights and its usual dropout."""
    torch.manual_seed(2)
    config = GPT2Config(
        n_layer=3, n_embd=48, n_head=2, vocab_size=64, n_positions=NUM_TOKENS, use_cache=False,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


class Images(Dataset[tuple[Tensor, int]]):
    """Random images, each made when it is asked for: what is not in use is not on the device."""

    def __len__(self) -> int:
        return NUM_STEPS * BATCH_SIZE

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.randn(3, 16, 16, generator=torch.Generator().manual_seed(index)), index % 10


class Text(Dataset[dict[str, Tensor]]):
    """Random tokens, made likewise."""

    def __len__(self) -> int:
        return NUM_STEPS * BATCH_SIZE

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.randint(0, 64, (NUM_TOKENS,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


@dataclasses.dataclass(slots=True)
class Seen:
    """What each step of a training showed.

    Attributes:
        tracker: Counts what is alive.
        gradients: A digest of all gradients after its backward.
        phases: What the plugin did.
        peaks: The true peak of forward and backward.
        memory: The plugin; None in a plain training.
        window: What counts while a step is under way.
        opened: What it counted.
    """

    tracker: LiveStorageTracker
    gradients: list[str] = dataclasses.field(default_factory=list)
    phases: list[str] = dataclasses.field(default_factory=list)
    peaks: list[int] = dataclasses.field(default_factory=list)
    memory: MemoryPlugin | None = None
    window: contextlib.ExitStack = dataclasses.field(default_factory=contextlib.ExitStack)
    opened: Window | None = None

    def begin(self) -> None:
        """A step begins."""
        self.tracker.register_all()
        self.opened = self.window.enter_context(self.tracker.window())

    def end(self, module: nn.Module) -> None:
        """Its backward has run."""
        self.window.close()
        assert self.opened is not None
        self.peaks.append(self.opened.peak_bytes)
        digest = hashlib.sha256()
        for parameter in module.parameters():
            assert parameter.grad is not None
            digest.update(parameter.grad.numpy().tobytes())
        self.gradients.append(digest.hexdigest())
        if self.memory is not None:
            self.phases.append(self.memory.phase)


class _Hooks(pl.Callback):
    def __init__(self, seen: Seen) -> None:
        self.seen = seen

    def on_train_batch_start(self, *args: Any) -> None:
        self.seen.begin()

    def on_after_backward(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.seen.end(module)


@contextmanager
def tracked() -> Iterator[Seen]:
    """Count what is alive of all that is made inside."""
    gc.collect()
    gc.freeze()
    with LiveStorageTracker() as tracker:
        yield Seen(tracker)


def fit(module: type[pl.LightningModule], folder: Path, offload: dict[str, Any] | None, **settings: Any) -> Seen:
    """Train with Lightning's Trainer; with keywords for a strategy, under that."""
    with tracked() as seen:
        strategy = OffloadStrategy(**offload) if offload is not None else "auto"
        trainer = trainer_factory(folder, max_epochs=1)(strategy=strategy, callbacks=[_Hooks(seen)], **settings)
        seen.memory = strategy.memory if isinstance(strategy, OffloadStrategy) else None
        torch.manual_seed(3)
        trainer.fit(module(), DataLoader(Images(), BATCH_SIZE))
    return seen


def accelerate(offload: dict[str, Any] | None) -> Seen:
    """Train with Accelerate."""
    with tracked() as seen:
        accelerator = Accelerator(cpu=True)
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        torch.manual_seed(3)
        model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(Images(), BATCH_SIZE))
        if offload is not None:
            seen.memory = prepare_offload(accelerator, model, **offload)
        for x, y in loader:
            seen.begin()
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            seen.end(model)
            optimizer.step()
            optimizer.zero_grad()
        if seen.memory is not None:
            seen.memory.detach()
    return seen


def hugging_face(folder: Path, offload: dict[str, Any] | None) -> Seen:
    """Train with the Trainer of transformers."""

    class Watched(Trainer):
        def training_step(self, model: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
            seen.begin()
            loss: Tensor = super().training_step(model, *args, **kwargs)
            seen.end(model)
            return loss

    with tracked() as seen:
        callback = OffloadCallback(**offload) if offload is not None else None
        seen.memory = callback.memory if callback is not None else None
        arguments = TrainingArguments(
            output_dir=str(folder), use_cpu=True, per_device_train_batch_size=BATCH_SIZE, num_train_epochs=1,
            report_to="none", eval_strategy="no", logging_steps=2, save_strategy="no", disable_tqdm=True,
            dataloader_pin_memory=False, seed=3,
        )  # fmt: skip
        callbacks = [callback] if callback is not None else []
        Watched(gpt2(), arguments, train_dataset=Text(), callbacks=callbacks).train()
    return seen
