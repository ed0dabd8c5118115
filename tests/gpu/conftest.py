"""Settings that hold for all tests of this folder."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

# Read when cuBLAS is first used: with it, matrix products repeat themselves whatever else runs.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Leave the cores to the other test processes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
