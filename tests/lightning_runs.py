"""What folders of tests that run Lightning's Trainer share: its notices silenced, and Trainers that write little."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

NOTICES = (
    "ignore:.*does not have many workers.*",
    "ignore:The number of training batches.*is smaller than the logging interval",
    "ignore:.*isinstance.treespec, LeafSpec.. is deprecated:FutureWarning",
    "ignore:Checkpoint directory .* exists and is not empty",
)

MakeTrainer = Callable[..., pl.Trainer]


def silence(items: Iterable[pytest.Item], folder: Path, notices: Iterable[str]) -> None:
    """Ignore warnings in the tests of a folder; ours stay errors, as in every test."""
    for item in items:
        if folder in item.path.parents:
            for notice in notices:
                item.add_marker(pytest.mark.filterwarnings(notice))


def trainer_factory(folder: Path, **defaults: Any) -> MakeTrainer:
    """A factory of Trainers on the CPU that write nothing but below a folder."""
    quiet: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "default_root_dir": folder,
    }
    return lambda **kwargs: pl.Trainer(**{**quiet, **defaults, **kwargs})


@pytest.fixture(autouse=True)
def quiet_log() -> Iterator[None]:
    """Keep Lightning's own messages out of the output."""
    log = logging.getLogger("lightning.pytorch")
    level = log.level
    log.setLevel(logging.WARNING)
    yield
    log.setLevel(level)
