"""A fixture for tests that collect garbage often, or whose code does: what the session has loaded is left out of it."""

from __future__ import annotations

import gc

import pytest


@pytest.fixture(autouse=True)
def quick_collections() -> None:
    """Collections look only at what the test makes, whose end takes this back."""
    gc.freeze()
