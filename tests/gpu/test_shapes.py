"""Steps whose shapes change are recorded, derived and planned on a GPU, too: exact, and within the budget."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from lightning_offload import MemoryPlugin
from tests.engine.test_shapes import JOBS, Batch
from tests.gpu.device import CUDA_MARKS, DEVICE, TOLERANT, peak_of_step, take_races, warm_up
from tests.gpu.probing import repeatably

pytestmark = [*CUDA_MARKS, TOLERANT]

NUM_STEPS = 14
MIB = 1 << 20


def _train(name: str, memory: MemoryPlugin | None) -> tuple[list[Tensor], list[int], list[tuple[str, int]]]:
    """Gradients of all steps, their peaks, and what each did, with the bytes that stayed on the device."""
    warm_up()
    build, make, largest = JOBS[name]
    rng = random.Random(2)
    torch.manual_seed(3)
    model = build().to(DEVICE)
    batches: list[Batch] = [largest, *(make(rng, step) for step in range(NUM_STEPS - 1))]
    found, peaks, shown = [], [], []
    for given in batches:
        batch = {key: tensor.to(DEVICE) for key, tensor in given.items()}
        model.zero_grad()
        torch.manual_seed(4)
        peaks.append(peak_of_step(model, batch, memory))
        if memory is not None:
            report = memory.report()
            shown.append(report.phase)
        found += [parameter.grad.clone().cpu() for parameter in model.parameters() if parameter.grad is not None]
        del batch
    return found, peaks, shown


@pytest.mark.parametrize("height", [0.7, 0.4])
@pytest.mark.parametrize("name", ["t5", "images"])
def test_changing_shapes_are_exact_and_within_the_budget(name: str, height: float) -> None:
    """From the fourth shape on steps are planned; recordings, too, are within the budget."""
    (expected, plain_peaks, _), _ = repeatably(lambda: _train(name, None))
    with MemoryPlugin(budget="1GiB", policy="all-swap") as memory:
        _, floor_peaks, _ = _train(name, memory)
    floor = max(floor_peaks)
    budget = int(floor + height * (max(plain_peaks) - floor)) + MIB
    with MemoryPlugin(budget=budget) as memory:
        (found, peaks, shown), _ = repeatably(lambda: _train(name, memory))
    assert not take_races()
    assert len(found) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert max(peaks) <= budget, (peaks, "all swapped", floor_peaks, "plain", plain_peaks)
    assert shown[0] == "recording"
    assert shown.count("planned") >= NUM_STEPS // 2
