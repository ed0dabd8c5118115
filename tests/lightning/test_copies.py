"""What reaches the Trainer can be copied and pickled within a fit, as without us."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_offload import OffloadMonitor, OffloadStrategy
from lightning_offload.strategies.mixin import CHECKPOINT_KEY
from tests.lightning.conftest import MakeTrainer
from tests.lightning.models import ConvNet, images

WAYS: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy, "deepcopy": copy.deepcopy, "pickle": lambda found: pickle.loads(cloudpickle.dumps(found)),
}  # fmt: skip
PARTS: dict[str, Callable[[Trainer], Any]] = {
    "trainer": lambda trainer: trainer,
    "callbacks": lambda trainer: trainer.callbacks,
    "strategy": lambda trainer: trainer.strategy,
    "precision": lambda trainer: trainer.strategy.precision_plugin,
    "fit_loop": lambda trainer: trainer.fit_loop,
    "model": lambda trainer: trainer.lightning_module,
}


class Copies(Callback):
    """Copies everything, once a plan is in force."""

    def __init__(self) -> None:
        self.made: dict[tuple[str, str], Any] = {}

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step != 5:
            return
        assert trainer.strategy.memory.phase == "planned"
        for part, get in PARTS.items():
            for way, make in WAYS.items():
                self.made[part, way] = make(get(trainer))


def test_copies_within_a_fit(make_trainer: MakeTrainer) -> None:
    """They carry no hooks: a copy of the strategy has a plugin of its own that serves nothing yet."""
    copies, strategy = Copies(), OffloadStrategy("1GiB")
    make_trainer(strategy=strategy, callbacks=[copies, OffloadMonitor()], enable_progress_bar=True).fit(
        ConvNet(), images(8)
    )
    assert len(copies.made) == len(PARTS) * len(WAYS)
    for (part, way), made in copies.made.items():
        if part == "precision":
            assert type(made) is type(strategy.precision_plugin)
            assert not any(name.startswith("_offload") for name in vars(made))
        if part == "strategy":
            assert type(made) is OffloadStrategy
            assert made.memory is not strategy.memory
            assert made.memory.budget == "1GiB"
            assert not made.memory.report().num_steps
            assert type(made.precision_plugin) is type(strategy.precision_plugin), way
    assert strategy.memory.report().num_steps == 8


class Rows(LightningDataModule):
    """Its loader needs it in the worker."""

    def collate(self, rows: list[Tensor]) -> Tensor:
        return torch.stack(rows)

    def train_dataloader(self) -> DataLoader[Any]:
        rows: Any = torch.randn(8, 8)
        return DataLoader(
            rows, batch_size=4, num_workers=1, collate_fn=self.collate, multiprocessing_context="spawn",
            persistent_workers=True,
        )  # fmt: skip


class Line(LightningModule):
    """Trains on rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 2)

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def test_a_spawned_worker_gets_a_data_module(make_trainer: MakeTrainer) -> None:
    """Which refers to the trainer, and that to the strategy."""
    trainer = make_trainer(strategy=OffloadStrategy("1GiB"))
    trainer.fit(Line(), datamodule=Rows())
    assert trainer.strategy.memory.report().num_steps == 2


class Holds(Callback):
    """Holds the checkpoint that it has seen."""

    seen: dict[str, Any]

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self.seen = checkpoint


def test_a_checkpoint_that_was_seen_stays_as_it_was(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """Our plans are in the file alone."""
    holds = Holds()
    trainer = make_trainer(strategy=OffloadStrategy("1GiB"), callbacks=[holds])
    trainer.fit(ConvNet(), images(5))
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    assert CHECKPOINT_KEY not in holds.seen
    assert CHECKPOINT_KEY in torch.load(tmp_path / "end.ckpt", weights_only=True)


@pytest.mark.parametrize("way", WAYS)
def test_copies_after_a_fit(make_trainer: MakeTrainer, way: str) -> None:
    """A copy trains as the strategy does."""
    strategy = OffloadStrategy("1GiB")
    make_trainer(strategy=strategy).fit(ConvNet(), images(5))
    assert WAYS[way](strategy).memory.budget == "1GiB"
