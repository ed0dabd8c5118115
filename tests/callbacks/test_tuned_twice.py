"""A model that was tuned, in another fit, in another finder, or from a checkpoint."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from tests.callbacks.conftest import MakeTrainer
from tests.callbacks.training import Clock, Net, finder_of, samples


class Rated(Net):
    """Has its rate among its hyperparameters, and no batch size."""

    def __init__(self, lr: float = 0.01, clock: Any = None) -> None:
        super().__init__(lr=lr, clock=clock)
        self.__dict__.pop("_hparams", None)
        self.save_hyperparameters("lr")
        del self.batch_size

    def train_dataloader(self) -> Any:
        raise AssertionError("its data come from a datamodule")

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), self.lr)


class Data(pl.LightningDataModule):
    """Has the batch size, which is as configured in each new one."""

    def __init__(self, batch_size: int = 4) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(samples(), self.batch_size)


def tuned(make_trainer: MakeTrainer, net: Any) -> tuple[Any, pl.Trainer]:
    net._clock = clock = Clock()
    finder = finder_of(clock, lr_scaling="linear")
    trainer = make_trainer(callbacks=[finder], max_epochs=1)
    trainer.fit(net, datamodule=Data())
    assert finder.result.batch_size == 16
    return finder, trainer


class Noted(Rated):
    """Has a hook of its own for checkpoints."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["note"] = "own"


@pytest.mark.parametrize("weights_only", [False, True])
@pytest.mark.parametrize("is_copied", [False, True])
def test_a_model_loaded_from_a_tuned_checkpoint_is_scaled_once(
    make_trainer: MakeTrainer, tmp_path: Path, weights_only: bool, is_copied: bool
) -> None:
    """Its rate is the configured one again, as its data's size is, and a new finder scales it as the first did."""
    net = Noted()
    _, trainer = tuned(make_trainer, net)
    path = tmp_path / "tuned.ckpt"
    if is_copied:  # a model that was in another process in between
        net._trainer = None
        trainer.strategy._lightning_module = trainer.strategy.model = pickle.loads(pickle.dumps(net))
    trainer.save_checkpoint(path, weights_only=weights_only)
    assert torch.load(path, weights_only=True)["note"] == "own"
    loaded = Rated.load_from_checkpoint(path)
    assert loaded.lr == 0.01
    finder, _ = tuned(make_trainer, loaded)
    assert loaded.lr == finder.result.lr == pytest.approx(0.04)


def test_where_size_and_rate_are_saved_together_both_are_the_found_ones(
    make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    """They go with one another, so there is nothing to put right."""
    clock = Clock()
    finder = finder_of(clock)
    trainer = make_trainer(callbacks=[finder], max_epochs=1)
    trainer.fit(Net(clock=clock))
    trainer.save_checkpoint(tmp_path / "tuned.ckpt")
    hparams = torch.load(tmp_path / "tuned.ckpt", weights_only=True)["hyper_parameters"]
    assert hparams == {"batch_size": 16, "lr": finder.result.lr}


def test_a_new_finder_knows_a_rate_that_was_scaled(make_trainer: MakeTrainer) -> None:
    """The same model with new data and a new finder: its rate is for 16 samples, and is not scaled to be for 64."""
    net = Rated()
    tuned(make_trainer, net)
    assert net.lr == pytest.approx(0.04)
    finder, _ = tuned(make_trainer, net)
    assert net.lr == pytest.approx(0.04)
    assert (finder.result.base_batch_size, finder.result.lr_factor) == (16, 1.0)
    net.lr = 0.05  # the user's own again, for the configured batch
    finder, _ = tuned(make_trainer, net)
    assert finder.result.base_batch_size == 4
    assert net.lr == pytest.approx(0.2)


def test_a_second_fit_keeps_a_rate_that_was_set_since(make_trainer: MakeTrainer) -> None:
    """What the user has set after the tuning is meant; without that the found one stays."""
    net = Rated()
    finder, _ = tuned(make_trainer, net)
    make_trainer(callbacks=[finder], max_epochs=1).fit(net, datamodule=Data())
    assert net.lr == pytest.approx(0.04)
    net.lr = 0.001
    trainer = make_trainer(callbacks=[finder], max_epochs=1)
    data = Data()
    trainer.fit(net, datamodule=data)
    assert net.lr == 0.001
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.001
    assert data.batch_size == 16
