"""Steps whose ops change from one to the next follow the plan for the widest one on a GPU, too."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_offload import MemoryPlugin
from tests.engine.test_structures import JOBS
from tests.gpu.device import CUDA_MARKS, DEVICE, IS_FAST, TOLERANT, peak_of_step, take_races, warm_up
from tests.gpu.probing import repeatably

pytestmark = [*CUDA_MARKS, TOLERANT]

NUM_STEPS = 20
NUM_LEARNING = 12
REMAINDER = (1 << 20) if IS_FAST else 0
"""CUDA's allocator does not split off less, and counts the whole block: much, where a model's tensors are no larger."""


def _train(
    name: str, memory: MemoryPlugin | None, *, forgets: bool = False
) -> tuple[list[Tensor], list[int], list[str]]:
    """Gradients of all steps, their peaks and their phases."""
    warm_up()
    build, make = JOBS[name]
    torch.manual_seed(3)
    model = build().to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    torch.manual_seed(4)
    found, peaks, phases = [], [], []
    for _ in range(NUM_STEPS):
        batch = {key: tensor.to(DEVICE) for key, tensor in make().items()}
        peaks.append(peak_of_step(model, batch, memory))
        if memory is not None:
            phases.append(memory.report().phase)
            if forgets:
                memory.forget()
        found += [parameter.grad.clone().cpu() for parameter in model.parameters() if parameter.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
        del batch
    return found, peaks, phases


@pytest.mark.parametrize("height", [0.7, 0.45])
@pytest.mark.parametrize("name", ["drop", "regularised", "turns", "drop, padded"])
def test_changing_structures_are_exact_and_within_the_budget(name: str, height: float) -> None:
    """Gradients are those of plain training; once the widest structure is known no step is above the budget."""
    (expected, plain_peaks, _), _ = repeatably(lambda: _train(name, None))
    with MemoryPlugin(budget="1GiB", policy="all-swap") as memory:
        _, floor_peaks, _ = _train(name, memory, forgets=True)
    floor = max(floor_peaks)
    budget = int(floor + height * (max(plain_peaks) - floor)) + REMAINDER
    with MemoryPlugin(budget=budget) as memory:
        (found, peaks, phases), _ = repeatably(lambda: _train(name, memory))
    assert not take_races()
    assert len(found) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert max(peaks[NUM_LEARNING:]) <= budget + REMAINDER, (peaks, "all swapped", floor_peaks, "plain", plain_peaks)
    assert phases[NUM_LEARNING:].count("planned") >= 6
