"""Links are measured once for a test process, not for each plugin."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def calibrations(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder that remembers what this process measured."""
    return str(tmp_path_factory.mktemp("calibrations"))


@pytest.fixture(autouse=True, scope="module")
def calibrated_once(calibrations: str) -> Iterator[None]:
    """Plugins share their measurements, also with those of processes that a test starts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LIGHTNING_OFFLOAD_CACHE", calibrations)
        yield
