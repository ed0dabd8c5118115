"""A fixture for tests of code that collects garbage often: what the session has loaded is left out of it."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def quick_collections() -> Iterator[None]:
    """Collections look only at what is made in this file's tests."""
    gc.freeze()
    yield
    gc.unfreeze()
