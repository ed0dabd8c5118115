"""Random programs under random plans leave the bits that plain PyTorch leaves."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from lightning_offload.runtime import cpu_lanes
from lightning_offload.runtime.executor import StepExecutor
from tests.fuzz.running import check
from tests.shares import is_all

NUM_CHUNKS = 10 if is_all() else 2
NUM_QUIET_CHUNKS = 4 if is_all() else 2
SEEDS_PER_CHUNK = 10


@pytest.mark.parametrize("chunk", range(NUM_CHUNKS))
def test_random_program_is_exact(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses, gradients, parameters, buffers, random states and errors are those of plain PyTorch."""
    if chunk % 2:
        monkeypatch.setattr(cpu_lanes, "SMALL_BYTES", 0)  # these programs' tensors are small: threads copy them too
    for seed in range(chunk * SEEDS_PER_CHUNK, (chunk + 1) * SEEDS_PER_CHUNK):
        check(seed)


@pytest.mark.parametrize("chunk", range(NUM_QUIET_CHUNKS))
def test_random_program_whose_steps_need_no_mode(chunk: int) -> None:
    """So it is where nothing is recomputed and no op is seen, and tensors are written behind version counters."""
    num_blind = 0

    def executor(self: StepExecutor, **how: Any) -> None:
        nonlocal num_blind
        num_blind += not (how["sees_ops"] or how.get("keeps_all"))
        made(self, **how)

    made = StepExecutor.__init__
    with mock.patch.object(StepExecutor, "__init__", executor):
        for seed in range(chunk * SEEDS_PER_CHUNK, (chunk + 1) * SEEDS_PER_CHUNK):
            check(seed, is_quiet=True)
    assert num_blind > SEEDS_PER_CHUNK
