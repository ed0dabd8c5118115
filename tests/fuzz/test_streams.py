"""Random programs under random plans leave plain PyTorch's bits over lanes of streams that dawdle, too."""

from __future__ import annotations

import pytest

from tests.engine.streams import Delays, only_in, only_out, streaming
from tests.fuzz.running import check
from tests.shares import is_all

SEEDS_PER_CHUNK = 10
CHUNKS: tuple[Delays | None, ...] = (None, only_out, only_in, None, *((None, None) if is_all() else ()))


@pytest.mark.parametrize("chunk", range(len(CHUNKS)))
def test_random_program_is_exact(chunk: int) -> None:
    """Losses, gradients, parameters, buffers, random states and errors are those of plain PyTorch."""
    for seed in range(chunk * SEEDS_PER_CHUNK, (chunk + 1) * SEEDS_PER_CHUNK):
        with streaming(CHUNKS[chunk], seed=seed, is_pageable=seed % 3 == 2):
            check(seed)
