"""Random programs under random plans leave the bits that plain PyTorch leaves."""

from __future__ import annotations

import pytest

from tests.fuzz.running import check

NUM_CHUNKS = 10
SEEDS_PER_CHUNK = 10


@pytest.mark.parametrize("chunk", range(NUM_CHUNKS))
def test_random_program_is_exact(chunk: int) -> None:
    """Losses, gradients, parameters, buffers, random states and errors are those of plain PyTorch."""
    for seed in range(chunk * SEEDS_PER_CHUNK, (chunk + 1) * SEEDS_PER_CHUNK):
        check(seed)
