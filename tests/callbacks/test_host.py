"""Models, callbacks and loggers that are hard on trials: each trains as it does untuned."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.utils.data import DataLoader

from tests.callbacks.conftest import MakeTrainer
from tests.callbacks.training import Clock, Net, assert_same, finder_of, fitted, samples


class Keeper(Net):
    """Keeps its optimizer, and a list that grows where the optimizer is made."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.names: list[str] = []

    def configure_optimizers(self) -> Any:
        made = super().configure_optimizers()
        self.made = made["optimizer"]
        self.names.append("AdamW")
        return made

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        assert self.names == ["AdamW"]
        self.average["rate"] = self.made.param_groups[0]["lr"]
        return super().training_step(batch, batch_idx)


class Framed(Net):
    """Its step needs what the hook before the batch has set, which the hook after it takes away."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.size_to_come = len(batch[0])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        assert self.size_to_come == len(batch[0])
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        del self.size_to_come
        self.average["last"] = outputs["loss"].item()


class Counting(Net):
    """Calculates with the number of batches of an epoch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        assert int(self.trainer.num_training_batches) > 1
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("kind", [Keeper, Framed, Counting])
def test_what_a_step_needs_is_there_in_a_trial(make_trainer: MakeTrainer, kind: Any, accumulation: int) -> None:
    """What `configure_optimizers` and the hooks around a batch set up, and numbers that a step may calculate with."""
    clock = Clock()
    finder = finder_of(clock)
    settings: dict[str, Any] = {"accumulate_grad_batches": accumulation}
    tuned = fitted(make_trainer(callbacks=[finder], **settings), kind(clock=clock))
    assert finder.result.batch_size == 16
    plain = fitted(make_trainer(**settings), kind(batch_size=16, lr=finder.result.lr))
    assert_same(tuned, plain)


class Watching(pl.Callback):
    """Notes outputs of a layer through a hook of its own."""

    def __init__(self) -> None:
        self.sums: list[float] = []

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        net: Any = pl_module
        net.head.register_forward_hook(lambda _, __, output: self.sums.append(output.sum().item()))


def test_what_a_callback_notes_through_a_hook_of_a_layer_is_of_the_training_alone(make_trainer: MakeTrainer) -> None:
    """Hooks of modules run in trials; the callback's own state is put back with the model's."""
    clock = Clock()
    finder, watching, plainly = finder_of(clock), Watching(), Watching()
    fitted(make_trainer(callbacks=[finder, watching]), Net(clock=clock))
    fitted(make_trainer(callbacks=[plainly]), Net(batch_size=16, lr=finder.result.lr))
    assert finder.result.batch_size == 16
    assert watching.sums == plainly.sums


def test_folders_of_the_loggers_are_known_in_a_trial(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """A step that reads them reads those of the run; nothing is logged there by a trial."""
    read: set[Any] = set()

    class Writing(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            logger: Any = self.logger
            read.add((logger.name, logger.version, os.path.join(logger.log_dir, "x"), logger.save_dir))
            logger.experiment.log_metrics({"mine": 1.0}, 0)
            return super().training_step(batch, batch_idx)

    clock = Clock()
    finder = finder_of(clock)
    trainer = make_trainer(callbacks=[finder], max_epochs=1, log_every_n_steps=1)
    trainer.loggers = [CSVLogger(tmp_path, name="run", version=3)]
    trainer.fit(Writing(clock=clock))
    assert finder.result.batch_size == 16
    assert read == {("run", 3, str(tmp_path / "run" / "version_3" / "x"), str(tmp_path))}
    lines = (tmp_path / "run" / "version_3" / "metrics.csv").read_text().splitlines()
    steps = 96 // 16
    assert sum("1.0" in line.split(",") for line in lines) == steps, "one line of the model's own for each step"


def test_a_finder_and_its_model_know_each_other_in_another_process(make_trainer: MakeTrainer) -> None:
    """Spawned processes get both by pickle; a fit there takes the result of a standalone tuning and tries nothing."""
    finder = finder_of()
    net = Net()
    result = finder.tune(make_trainer(), net)
    finder, net = pickle.loads(pickle.dumps((finder, net)))
    steps = -(-96 // result.batch_size)
    make_trainer(callbacks=[finder], max_epochs=1).fit(net)
    assert finder.result == result
    assert net.sizes[0] == result.batch_size
    assert len(net.sizes) == steps


def test_a_last_batch_of_one_sample_is_avoided_under_batch_norm(make_trainer: MakeTrainer) -> None:
    """96 samples in batches of 19 leave one, on which batch norm raises; the next lower size is taken, and said."""
    clock = Clock()
    finder = finder_of(clock, max_val=19)
    net = Net(clock=clock)
    make_trainer(callbacks=[finder], max_epochs=1).fit(net)
    assert finder.result.batch_size == 18
    assert finder.result.effective_batch_size == 18
    assert finder.result.lr == net.lr
    assert "Not 19" in finder.result.note
    assert net.sizes == [18] * 5 + [6]


@pytest.mark.parametrize(
    ("settings", "largest"),
    [
        ({"val_check_interval": 5}, 18),
        ({"val_check_interval": 5, "check_val_every_n_epoch": None}, 96),
        ({"limit_train_batches": 0.2}, 18),
        ({"limit_train_batches": 0.5, "val_check_interval": 3}, 16),
        ({"accumulate_grad_batches": 3}, 32),
        ({"accumulate_grad_batches": 30}, 4),
    ],
)
def test_an_epoch_keeps_enough_batches_for_the_trainer(
    make_trainer: MakeTrainer, settings: dict[str, Any], largest: int
) -> None:
    """The Trainer refuses an epoch shorter than `val_check_interval` or of no whole batch: no such size is chosen."""

    class Validated(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.stem(batch[0])

        def val_dataloader(self) -> DataLoader[Any]:
            return DataLoader(samples(), self.batch_size)

    clock = Clock()
    finder = finder_of(clock, max_val=None)
    trainer = make_trainer(callbacks=[finder], max_epochs=1, **settings)
    trainer.fit(Validated(clock=clock, scheduler="step"))
    assert finder.result.batch_size == largest
    assert trainer.global_step > 0


def test_a_warm_up_begins_anew_with_another_model(make_trainer: MakeTrainer) -> None:
    """One finder in two fits: the steps of the first are not counted in the second."""
    clock = Clock()
    finder = finder_of(clock, lr_scaling="linear", lr_warmup_steps=6)
    for _ in range(2):
        net = Net(clock=clock, scheduler="step")
        net.configure_optimizers = lambda net=net: torch.optim.SGD(net.parameters(), net.lr)
        make_trainer(callbacks=[finder], max_epochs=1).fit(net)
        assert finder.state_dict()["warmup"]["steps"] == [96 // 16]
