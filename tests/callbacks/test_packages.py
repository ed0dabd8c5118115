"""The class for each Lightning package, and LightningCLI."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import BatchSizeFinder
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.demos.boring_classes import BoringModel

import lightning_offload as lo
from tests.callbacks.conftest import MakeTrainer


def test_it_is_called_before_other_callbacks(make_trainer: MakeTrainer) -> None:
    """Lightning moves its own kind of finder to the front."""
    other = pl.callbacks.LambdaCallback()
    finder = lo.EfficientBatchSizeFinder()
    trainer = make_trainer(callbacks=[other, finder])
    assert isinstance(finder, BatchSizeFinder)
    assert trainer.callbacks[0] is finder


@pytest.mark.filterwarnings("ignore::DeprecationWarning:jsonargparse", "ignore:\\s+By default only one Jsonargparse")
@pytest.mark.filterwarnings("ignore:\\s+.*deprecated")
def test_the_cli_knows_every_keyword() -> None:
    """Each is annotated, so that a configuration file can set it."""
    parser = LightningArgumentParser()
    parser.add_class_arguments(lo.EfficientBatchSizeFinder, "finder")
    parsed: Any = parser.parse_args(["--finder.max_val=64", "--finder.lr_scaling=sqrt", "--finder.lr_arg_name=null",
                                     "--finder.advanced.tolerance=0.05"])  # fmt: skip
    made: Any = parser.instantiate_classes(parsed).finder
    assert made._options.max_val == 64
    assert made._options.lr_scaling == "sqrt"
    assert made._options.lr_arg_name is None
    assert made._options.tolerance == 0.05


def test_evaluation_is_left_alone(make_trainer: MakeTrainer) -> None:
    """Validation runs at the configured size."""

    class Model(BoringModel):
        batch_size = 4
        lr = 0.1

    finder = lo.EfficientBatchSizeFinder()
    make_trainer(callbacks=[finder]).validate(Model(), verbose=False)
    assert finder.result is None


def test_the_other_package_tunes_too() -> None:
    """In a process of its own pytorch_lightning gets its own class, and a fit of its Trainer is tuned."""
    package = "pytorch_lightning"
    pytest.importorskip(package, reason=f"{package} is not installed")
    code = f"""
import warnings; warnings.simplefilter("ignore")
import {package} as pl, torch, lightning_offload as lo
class M(pl.LightningModule):
    def __init__(self):
        super().__init__(); self.batch_size, self.lr, self.net = 4, 0.1, torch.nn.Linear(2, 1)
    def training_step(self, batch, index): return self.net(batch).square().mean()
    def configure_optimizers(self): return torch.optim.SGD(self.parameters(), self.lr)
    def train_dataloader(self): return torch.utils.data.DataLoader(torch.ones(64, 2), self.batch_size)
advanced = {{"steps_per_trial": 1, "warmup_steps": 0}}
finder = lo.EfficientBatchSizeFinder(max_val=16, on_failure="raise", advanced=advanced)
trainer = pl.Trainer(accelerator="cpu", callbacks=[finder], max_epochs=1, logger=False, enable_checkpointing=False,
                     enable_progress_bar=False, enable_model_summary=False)
model = M(); trainer.fit(model)
assert isinstance(finder, pl.callbacks.BatchSizeFinder)
assert model.batch_size == finder.result.batch_size
assert trainer.global_step == -(-64 // model.batch_size)
try:
    model.batch_size = "x"; trainer.fit(model, ckpt_path=None); finder._token = ""; trainer.fit(model)
except pl.utilities.exceptions.MisconfigurationException as error:
    assert isinstance(error, lo.TuningError)
else: raise AssertionError
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
