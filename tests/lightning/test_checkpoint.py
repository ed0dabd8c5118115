"""Plans travel in the Lightning checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_offload import OffloadStrategy
from lightning_offload.strategies.mixin import CHECKPOINT_KEY
from tests.lightning.conftest import MakeTrainer
from tests.lightning.models import ConvNet, assert_same, fit_and_read, images


class Phases(pl.Callback):
    """Notes the plugin's phase after each training batch."""

    def __init__(self) -> None:
        self.phases: list[str] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self.phases.append(trainer.strategy.memory.report().phase)


def saved(make_trainer: MakeTrainer, path: Path, strategy: Any) -> Path:
    """Fits one epoch and saves a checkpoint."""
    pl.seed_everything(5, verbose=False)
    trainer = make_trainer(strategy=strategy)
    trainer.fit(ConvNet(), images())
    trainer.save_checkpoint(path / "epoch.ckpt")
    return path / "epoch.ckpt"


def resumed(make_trainer: MakeTrainer, checkpoint: Path, **settings: Any) -> dict[str, Any]:
    """Fits a second epoch from the checkpoint and returns the state it leaves."""
    pl.seed_everything(6, verbose=False)
    return fit_and_read(make_trainer(max_epochs=2, **settings), ConvNet(), ckpt_path=checkpoint)


@pytest.mark.parametrize(("first", "second"), [(0, 1), (1, 0), (1, 1)], ids=["to-ours", "from-ours", "ours"])
def test_resume_is_exact(make_trainer: MakeTrainer, tmp_path: Path, first: int, second: int) -> None:
    """Checkpoints move freely between the plain Trainer and ours, and what follows is equal bit for bit."""
    plain = resumed(make_trainer, saved(make_trainer, tmp_path, "auto"))

    def strategy(ours: int) -> Any:
        return OffloadStrategy("1GiB", policy="all-swap") if ours else "auto"

    checkpoint = saved(make_trainer, tmp_path, strategy(first))
    assert (CHECKPOINT_KEY in torch.load(checkpoint, weights_only=True)) == bool(first)
    assert_same(resumed(make_trainer, checkpoint, strategy=strategy(second)), plain)


def test_a_resumed_run_starts_planned(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """After a resume the first step runs under the plan already."""
    fresh = Phases()
    make_trainer(strategy=OffloadStrategy("1GiB"), callbacks=[fresh]).fit(ConvNet(), images())
    assert fresh.phases[0] != "planned"
    assert fresh.phases[-1] == "planned"

    checkpoint = saved(make_trainer, tmp_path, OffloadStrategy("1GiB"))
    again = Phases()
    resumed(make_trainer, checkpoint, strategy=OffloadStrategy("1GiB"), callbacks=[again])
    assert set(again.phases) == {"planned"}


def test_weights_only_checkpoint_has_no_plans(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """A checkpoint of the weights alone stays one."""
    trainer = make_trainer(strategy=OffloadStrategy("1GiB"))
    trainer.fit(ConvNet(), images())
    trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    assert CHECKPOINT_KEY not in torch.load(tmp_path / "weights.ckpt", weights_only=True)


def test_unusable_plans_are_replaced(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """A checkpoint with plans that cannot be read is resumed with one warning and new plans."""
    plain = resumed(make_trainer, saved(make_trainer, tmp_path, "auto"))
    checkpoint = torch.load(saved(make_trainer, tmp_path, OffloadStrategy("1GiB")), weights_only=True)
    checkpoint[CHECKPOINT_KEY] = {"version": "nonsense"}
    torch.save(checkpoint, tmp_path / "odd.ckpt")
    with pytest.warns(UserWarning, match="memory plan is not used") as caught:
        ours = resumed(make_trainer, tmp_path / "odd.ckpt", strategy=OffloadStrategy("1GiB"))
    assert len([w for w in caught if "memory plan" in str(w.message)]) == 1
    assert_same(ours, plain)


def test_testing_from_a_checkpoint(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """Evaluation from a checkpoint ignores its plans."""
    checkpoint = saved(make_trainer, tmp_path, OffloadStrategy("1GiB"))
    strategy = OffloadStrategy("1GiB")
    make_trainer(strategy=strategy).test(ConvNet(), images(2), ckpt_path=checkpoint, verbose=False)
    assert strategy.memory.report().phase == "idle"
