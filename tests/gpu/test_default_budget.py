"""What is taken to be there where no budget is given, and what is done where the allocator finds less."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from lightning_offload import MemoryPlugin
from tests.gpu.device import CUDA_MARKS, DEVICE, TOLERANT, clean

pytestmark = [*CUDA_MARKS, TOLERANT]

MIB = 1 << 20


@pytest.fixture(autouse=True)
def all_memory() -> Iterator[None]:
    """Tests may take memory away."""
    clean()
    yield
    clean()
    torch.cuda.set_per_process_memory_fraction(1.0, torch.cuda.current_device())


def net() -> tuple[nn.Module, Tensor]:
    """A model whose step saves 24 MiB, and a batch."""
    torch.manual_seed(3)
    blocks = [part for _ in range(12) for part in (nn.Linear(256, 256), nn.Tanh())]
    return nn.Sequential(*blocks).to(DEVICE), torch.randn(2048, 256, device=DEVICE)


def step(model: nn.Module, batch: Tensor) -> list[Tensor]:
    model.zero_grad()
    model(batch).square().mean().backward()
    return [weight.grad.clone() for weight in model.parameters() if weight.grad is not None]


@pytest.mark.parametrize("budget", [None, "2GiB"])
def test_budget_is_read_again_after_the_recording(monkeypatch: pytest.MonkeyPatch, budget: str | None) -> None:
    """What was loaded by then is not there for tensors; a budget that was given stays."""
    free_bytes, total_bytes = torch.cuda.mem_get_info(DEVICE)
    model, batch = net()
    expected = step(model, batch)
    taken = [0]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free_bytes - taken[0], total_bytes))
    with MemoryPlugin(budget=budget) as memory:
        budgets = []
        for _ in range(6):
            with memory.step(batch):
                found = step(model, batch)
                budgets.append(memory.budget_bytes or 0)
            taken[0] = free_bytes // 4  # from the end of the recording on
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        report = memory.report()
    assert report.phase == "planned"
    if budget is not None:
        assert set(budgets) == {2 << 30}
        return
    assert budgets[0] - budgets[1] >= free_bytes // 4 - total_bytes // 50
    assert set(budgets[1:]) == {report.budget_bytes}
    assert report.budget_bytes <= torch.cuda.mem_get_info(DEVICE)[0] + torch.cuda.memory_reserved(DEVICE)


def test_plans_become_tighter_while_the_allocator_gives_its_reserve_back() -> None:
    """A user's own code needs another large block after each step, for which the allocator clears its reserve."""
    model, batch = net()
    expected = step(model, batch)
    device = torch.cuda.current_device()
    predicted, retries = [], []
    with MemoryPlugin(budget="2GiB") as memory:
        for index in range(16):
            with memory.step(batch):
                found = step(model, batch)
            if index == 6:
                report = memory.report()
                clean()
                total_bytes = torch.cuda.get_device_properties(device).total_memory
                allowed_bytes = (report.predicted_peak_bytes or 0) + 64 * MIB
                torch.cuda.set_per_process_memory_fraction(allowed_bytes / total_bytes, device)
            torch.empty((30 + 2 * index) * MIB, dtype=torch.uint8, device=DEVICE)
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
            del found
            predicted.append(memory.report().predicted_peak_bytes or 0)
            retries.append(torch.cuda.memory_stats(DEVICE)["num_alloc_retries"])
    assert retries[-1] > retries[6], "there was memory enough: the test tests nothing"
    assert predicted[-1] <= 0.95 * predicted[6]
