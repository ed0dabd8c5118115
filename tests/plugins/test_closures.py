"""Steps in the closure of an optimizer that calls it again and again, and keeps what it makes meanwhile."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_offload import MemoryPlugin
from lightning_offload.errors import BudgetInfeasibleError
from tests.engine.live_tracker import LiveStorageTracker

NUM_CALLS = 4


def _train(memory: MemoryPlugin | None, history_size: int = 20) -> tuple[list[bytes], list[int]]:
    """The parameters in the end, and the true peaks of the steps."""
    torch.manual_seed(0)
    net, peaks = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 1)), []
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=4, history_size=history_size)
    with LiveStorageTracker() as tracker:
        for _ in range(NUM_CALLS):
            x = torch.randn(256, 64)

            def closure(x: torch.Tensor = x) -> torch.Tensor:
                optimizer.zero_grad()
                tracker.register_all()
                with tracker.window() as window:
                    if memory is None:
                        loss = net(x).square().mean()
                        loss.backward()
                    else:
                        with memory.step(x):
                            loss = net(x).square().mean()
                            loss.backward()
                peaks.append(window.peak_bytes)
                return loss

            optimizer.step(closure)
    return [parameter.detach().numpy().tobytes() for parameter in net.parameters()], peaks


def test_the_budget_that_an_error_names_lasts() -> None:
    """It has room for the history that is yet to come; the run that it is given to ends, with plain's bits."""
    with MemoryPlugin("1000000B", policy="all-swap") as memory, pytest.raises(BudgetInfeasibleError) as caught:
        _train(memory)
    assert "history_size=" in str(caught.value)
    assert f"({caught.value.floor_bytes} bytes)" in str(caught.value)
    expected, _ = _train(None)
    with MemoryPlugin(f"{caught.value.floor_bytes}B") as memory:
        trained, _ = _train(memory)
    assert trained == expected


def test_peaks_are_within_the_budget_while_the_history_grows() -> None:
    """Counted from outside, in each step; what grows within one call is noticed at the step that follows."""
    expected, plain_peaks = _train(None)
    budget = max(plain_peaks)
    with MemoryPlugin(f"{budget}B") as memory:
        trained, peaks = _train(memory)
    assert trained == expected
    assert max(peaks) <= budget
