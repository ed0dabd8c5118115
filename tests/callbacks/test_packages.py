"""The class for Lightning, and LightningCLI; that of the other package is tuned with in `tests.lightning.fit_with`."""

from __future__ import annotations

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
