"""The global generators of random numbers are put back."""

from __future__ import annotations

import random

import numpy as np
import torch

from lightning_offload.tuning.snapshot import RandomStates


def test_the_global_generators_go_on_from_where_they_were() -> None:
    """Python's, NumPy's and torch's give the same numbers once more."""

    def draw() -> tuple[float, float, float]:
        return random.random(), np.random.rand(), torch.rand(1).item()  # noqa: NPY002

    states = RandomStates.now()
    first = draw()
    draw()
    states.restore()
    assert draw() == first
