"""Fits under Lightning's own launchers, which start the other process themselves.

Usage: python launcher_script.py popen|spawn FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy

from lightning_offload import DDPOffloadStrategy
from tests.distributed.fitting import check_plan, compare, make_trainer
from tests.lightning.models import ConvNet, assert_same, images
from tests.shares import is_all

_SETTINGS: list[dict[str, Any]] = [{}]
if is_all():  # they are those of `torchrun_checks`, and the launcher has no part in them
    _SETTINGS += [
        {"accumulate_grad_batches": 4},
        {"precision": "bf16-mixed"},
        {"precision": "bf16-mixed", "accumulate_grad_batches": 4},
    ]


def popen(folder: Path) -> None:
    """Each process runs this script: the strategy equals plain DDP."""
    for settings in _SETTINGS:
        strategy = compare(**settings)
    (folder / f"done{strategy.global_rank}").touch()
    torch.distributed.destroy_process_group()  # Lightning leaves a gloo one, whose threads must not outlive Python


def spawn(folder: Path) -> None:
    """The fit runs in a process that gets the pickled strategy, and makes a plugin of its own; one is enough to see."""
    plain = _fitted(folder / "plain.pt", DDPStrategy(start_method="fork"))  # which starts faster
    ours = _fitted(folder / "ours.pt", DDPOffloadStrategy("1GiB", policy="all-swap", start_method="spawn"))
    assert_same(ours, plain)
    (folder / "done0").touch()


class Saves(pl.Callback):
    """Runs where the fit does, and shows that a plan was in force there."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if isinstance(trainer.strategy, DDPOffloadStrategy):
            check_plan([trainer.strategy.memory.report()], is_tight=False)
        if trainer.is_global_zero:
            torch.save([pl_module.state_dict(), pl_module.losses], self.path)


def _fitted(path: Path, strategy: DDPStrategy) -> object:
    pl.seed_everything(3, verbose=False)
    make_trainer(strategy, devices=1, callbacks=[Saves(path)]).fit(ConvNet(), images(8))
    return torch.load(path)


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"popen": popen, "spawn": spawn}[sys.argv[1]](Path(sys.argv[2]))
