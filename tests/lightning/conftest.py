"""Lightning's own notices are silenced here; ours stay errors, as in every test."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lightning_runs import NOTICES, MakeTrainer, silence, trainer_factory
from tests.lightning_runs import quiet_log as quiet_log
from tests.one_thread import one_thread as one_thread
from tests.short_searches import short_searches as short_searches

_NOTICES = (
    *NOTICES,
    "ignore:GPU available but not used",
    "ignore:You defined a `validation_step` but have no `val_dataloader`",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    silence(items, Path(__file__).parent, _NOTICES)


@pytest.fixture
def make_trainer(tmp_path: Path) -> MakeTrainer:
    """A factory of Trainers on the CPU that write nothing but below `tmp_path`."""
    return trainer_factory(tmp_path, max_epochs=1)
