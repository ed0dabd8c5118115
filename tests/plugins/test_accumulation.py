"""Gradients of earlier steps: they lie beside a step until backward adds to them, or the program drops them."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from lightning_offload import MemoryPlugin
from tests.engine.live_tracker import LiveStorageTracker
from tests.plugins.training import attached, net, rows, train_step

NUM_STEPS = 12
FEW_BYTES = 256
"""Losses, and what counts them."""


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    """What was set aside comes back."""
    yield
    gc.unfreeze()


@pytest.fixture(scope="module", autouse=True)
def links_are_measured() -> None:
    """Once in a process, with memory that is no step's."""
    model, batch = net(), rows()
    with attached(model, budget="64MiB", policy="all-swap") as memory:
        for _ in range(3):
            train_step(model, batch, memory)


def tied() -> nn.Module:
    """A net whose gradients outweigh what it saves, one of them of a parameter that is used twice."""
    torch.manual_seed(1)
    first, second = nn.Linear(200, 200), nn.Linear(200, 200)
    second.weight = first.weight
    return nn.Sequential(first, nn.Tanh(), second, nn.Sigmoid(), nn.Linear(200, 320), nn.Tanh(), nn.Linear(320, 8))


def train(where: str, every: int, memory: MemoryPlugin | None) -> tuple[list[bytes], list[int], list[int | None]]:
    """The parameters in the end, the peak of each step as counted from outside, and what was predicted for it.

    Args:
        where: Where gradients are dropped: "between" steps, "within" one before backward, or only "zeroed" between.
        every: Steps of an update.
        memory: Serves the steps.
    """
    gc.collect()
    gc.freeze()  # nobody is to count what others left
    model = tied()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    torch.manual_seed(2)
    peaks, predicted = [], []
    with LiveStorageTracker() as tracker:
        for i in range(NUM_STEPS):
            x = torch.randn(24, 200)
            tracker.register_all()
            around = memory.step(x) if memory is not None else contextlib.nullcontext()
            with tracker.window() as window, around:
                loss = model(x).square().mean()
                if where == "within" and i % every == 0:
                    optimizer.zero_grad()
                loss.backward()
            del loss, x
            peaks.append(window.peak_bytes)
            if memory is not None:
                predicted.append(memory.report(of_last=True).predicted_peak_bytes)
            if (i + 1) % every == 0:
                optimizer.step()
                if where != "within":
                    optimizer.zero_grad(set_to_none=where == "between")
    return [p.detach().numpy().tobytes() for p in model.parameters()], peaks, predicted


@pytest.mark.parametrize("every", [1, 2, 4])
@pytest.mark.parametrize("where", ["between", "within", "zeroed"])
def test_budgets_are_kept(where: str, every: int) -> None:
    """Plain training's own peak, and the least; predicted is the most that a step of an update needs."""
    expected, plain_peaks, _ = train(where, every, None)
    with MemoryPlugin("1GiB", policy="all-swap") as memory:
        trained, least, _ = train(where, every, memory)
    assert trained == expected
    for budget in (max(plain_peaks), max(least[4:]) + FEW_BYTES):
        with MemoryPlugin(f"{budget}B") as memory:
            trained, peaks, predicted = train(where, every, memory)
            assert memory.report().phase == "planned"
        assert trained == expected
        assert max(peaks) <= budget
        in_the_end = predicted[-1]
        assert in_the_end is not None
        assert abs(in_the_end - max(peaks[-every:])) <= FEW_BYTES
