"""Random programs under random plans leave the bits that plain PyTorch leaves."""

from __future__ import annotations

import pytest

from lightning_offload.runtime import cpu_lanes
from tests.fuzz.running import check

NUM_CHUNKS = 10
SEEDS_PER_CHUNK = 10


@pytest.mark.parametrize("chunk", range(NUM_CHUNKS))
def test_random_program_is_exact(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses, gradients, parameters, buffers, random states and errors are those of plain PyTorch."""
    if chunk % 2:
        monkeypatch.setattr(cpu_lanes, "SMALL_BYTES", 0)  # these programs' tensors are small: threads copy them too
    for seed in range(chunk * SEEDS_PER_CHUNK, (chunk + 1) * SEEDS_PER_CHUNK):
        check(seed)
