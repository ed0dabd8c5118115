"""What pages take for granted: a model, data and the like, small, for those whose code names them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

LENGTH = 8


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """Random tokens, as a language model is given them."""

    def __init__(self, num_samples: int) -> None:
        self.ids = torch.randint(16, (num_samples, LENGTH))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def language_model() -> nn.Module:
    """A GPT-2 of two layers."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(vocab_size=16, n_positions=LENGTH, n_embd=8, n_layer=2, n_head=2, use_cache=False)
    )


def language_training(batch_size: int) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[dict[str, torch.Tensor]]]:
    """A language model, its optimizer and its data, on a device that is full beyond a size."""
    if batch_size > 128:
        raise torch.OutOfMemoryError("out of memory")
    model = language_model()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3), DataLoader(Tokens(16 * batch_size), batch_size)


class Classifier(pl.LightningModule):
    """Two layers, with the attributes that a tuner looks for."""

    def __init__(self, batch_size: int = 4) -> None:
        super().__init__()
        self.lr, self.batch_size = 0.1, batch_size
        self.layers = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self.layers(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class Points(pl.LightningDataModule):
    """Random points of two classes."""

    def __init__(self, batch_size: int = 4) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader[tuple[torch.Tensor, ...]]:
        return points(self.batch_size)


def points(batch_size: int = 4) -> DataLoader[tuple[torch.Tensor, ...]]:
    """Their loader."""
    return DataLoader(TensorDataset(torch.randn(24, 4), torch.randint(2, (24,))), batch_size)


@contextmanager
def readme() -> Iterator[dict[str, Any]]:
    module = Classifier()
    yield {
        "lightning_module": module,
        "model": module.layers,
        "loader": points(),
        "loss_fn": nn.CrossEntropyLoss(),
        "optimizer": torch.optim.SGD(module.parameters(), lr=0.1),
    }


@contextmanager
def adapters() -> Iterator[dict[str, Any]]:
    from transformers import TrainingArguments

    model, optimizer, loader = language_training(4)
    arguments = TrainingArguments(
        output_dir="trainer", use_cpu=True, num_train_epochs=1, report_to="none", save_strategy="no", disable_tqdm=True
    )
    yield {
        "model": model, "optimizer": optimizer, "loader": loader, "args": arguments, "data": Tokens(32),
        "build": language_training,
    }  # fmt: skip


@contextmanager
def tuning() -> Iterator[dict[str, Any]]:
    yield {"model": Classifier(), "data": Points()}


@contextmanager
def losses() -> Iterator[dict[str, Any]]:
    yield {"model": language_model(), "tokens": torch.randint(16, (2, LENGTH))}


@contextmanager
def distributed() -> Iterator[dict[str, Any]]:
    """As torchrun starts the only process of a training."""
    before = dict(os.environ)
    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost", MASTER_PORT="0")
    yield {}
    os.environ.clear()
    os.environ.update(before)


@contextmanager
def report() -> Iterator[dict[str, Any]]:
    """A step that `plan --output` wrote, of which a page and a trace are made."""
    from tests.report.steps import SIX

    Path("plan.graph.json").write_text(SIX.to_json(), encoding="utf-8")
    yield {}
    assert {path.name for path in Path.cwd().iterdir()} == {"plan.graph.json", "plan.html", "trace.json"}


@contextmanager
def configuration() -> Iterator[dict[str, Any]]:
    """The configuration that the page shows."""
    from tests.docs.blocks import ROOT, blocks_of

    (shown,) = (block for block in blocks_of(ROOT / "docs/lightning-cli.md") if block.language == "yaml")
    Path("config.yaml").write_text(shown.text, encoding="utf-8")
    yield {}


GIVEN: dict[str, Callable[[], Any]] = {
    "README.md": readme,
    "docs/adapters.md": adapters,
    "docs/distributed.md": distributed,
    "docs/lightning-cli.md": configuration,
    "docs/losses.md": losses,
    "docs/report.md": report,
    "docs/tuning.md": tuning,
}
"""By page: the names that its code may use, for as long as it runs. A page that is not here needs nothing."""
