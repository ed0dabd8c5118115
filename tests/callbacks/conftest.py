"""Lightning's own notices are silenced here; ours stay errors, as in every test."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from tests.quick_collections import quick_collections as quick_collections

_NOTICES = (
    "ignore:.*does not have many workers.*",
    "ignore:The number of training batches.*is smaller than the logging interval",
    "ignore:.*isinstance.treespec, LeafSpec.. is deprecated:FutureWarning",
    "ignore:Checkpoint directory .* exists and is not empty",
    "ignore:Experiment logs directory .* exists and is not empty",
    "ignore:You're resuming from a checkpoint that ended before the epoch ended",
)

MakeTrainer = Callable[..., pl.Trainer]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            for notice in _NOTICES:
                item.add_marker(pytest.mark.filterwarnings(notice))


@pytest.fixture(autouse=True)
def quiet_log() -> Iterator[None]:
    log = logging.getLogger("lightning.pytorch")
    level = log.level
    log.setLevel(logging.WARNING)
    yield
    log.setLevel(level)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(autouse=True, scope="module")
def calibrated_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Links are measured once for a file of tests, not for each recording."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LIGHTNING_OFFLOAD_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def make_trainer(tmp_path: Path) -> MakeTrainer:
    """A factory of Trainers on the CPU that write nothing but below `tmp_path`."""

    def make(**kwargs: Any) -> pl.Trainer:
        settings: dict[str, Any] = {
            "accelerator": "cpu",
            "devices": 1,
            "max_epochs": 2,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "num_sanity_val_steps": 0,
            "default_root_dir": tmp_path,
        }
        return pl.Trainer(**{**settings, **kwargs})

    return make
