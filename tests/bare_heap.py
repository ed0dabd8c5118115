"""Fixtures for tests that compare what lies on the device with what was predicted: nothing of others is in either."""

from __future__ import annotations

import pytest

from tests.plugins.training import attached, net, rows, train_step

FEW_BYTES = 256
"""Losses, and what counts them."""


@pytest.fixture(scope="module", autouse=True)
def links_are_measured() -> None:
    """Once in a process, with memory that is no step's."""
    model, batch = net(), rows()
    with attached(model, budget="64MiB", policy="all-swap") as memory:
        for _ in range(3):
            train_step(model, batch, memory)
