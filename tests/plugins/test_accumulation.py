"""Gradients of earlier steps: they lie beside a step until backward adds to them, or the program drops them."""

from __future__ import annotations

import contextlib
import gc
import json
from typing import Any

import pytest
import torch
from torch import nn

from lightning_offload import MemoryPlugin
from tests.bare_heap import FEW_BYTES
from tests.bare_heap import links_are_measured as links_are_measured
from tests.engine.live_tracker import LiveStorageTracker
from tests.shares import pairs

NUM_STEPS = 12


def tied() -> nn.Module:
    """A net whose gradients outweigh what it saves, one of them of a parameter that is used twice."""
    torch.manual_seed(1)
    first, second = nn.Linear(200, 200), nn.Linear(200, 200)
    second.weight = first.weight
    return nn.Sequential(first, nn.Tanh(), second, nn.Sigmoid(), nn.Linear(200, 320), nn.Tanh(), nn.Linear(320, 8))


def train(
    where: str, every: int, memory: MemoryPlugin | None, *, asks: bool = True, at_first: bool = False
) -> tuple[list[bytes], list[int], list[int | None]]:
    """The parameters in the end, the peak of each step as counted from outside, and what was predicted for it.

    Args:
        where: Where gradients are dropped: "between" steps, "within" one before backward, or only "zeroed" between.
        every: Steps of an update.
        memory: Serves the steps.
        asks: Whether it is asked for its report after each.
        at_first: Whether there are gradients before the first step.
    """
    gc.collect()
    gc.freeze()  # nobody is to count what others left
    model = tied()
    for parameter in model.parameters() if at_first else ():
        parameter.grad = torch.zeros_like(parameter)
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
            if memory is not None and (asks or i + 1 == NUM_STEPS):
                predicted.append(memory.report(of_last=True).predicted_peak_bytes)
            if (i + 1) % every == 0:
                optimizer.step()
                if where != "within":
                    optimizer.zero_grad(set_to_none=where == "between")
    return [p.detach().numpy().tobytes() for p in model.parameters()], peaks, predicted


@pytest.mark.parametrize("asks", [True, False])
@pytest.mark.parametrize(("where", "every"), pairs(["between", "within", "zeroed"], [1, 2, 4], every=2))
def test_budgets_are_kept(where: str, every: int, asks: bool) -> None:
    """Plain training's own peak, and the least; predicted is the most that a step of an update needs."""
    expected, plain_peaks, _ = train(where, every, None)
    with MemoryPlugin("1GiB", policy="all-swap") as memory:
        trained, least, _ = train(where, every, memory, asks=asks)
    assert trained == expected
    for budget in (max(plain_peaks), max(least[4:]) + FEW_BYTES):
        with MemoryPlugin(f"{budget}B") as memory:
            trained, peaks, predicted = train(where, every, memory, asks=asks)
            assert memory.report().phase == "planned"
        assert trained == expected
        assert max(peaks) <= budget
        in_the_end = predicted[-1]
        assert in_the_end is not None
        assert abs(in_the_end - max(peaks[-every:])) <= FEW_BYTES


def test_those_from_before_the_first_step_count_once() -> None:
    """In the step that is recorded with them, and in a training that goes on with its plan."""
    expected, plain_peaks, _ = train("zeroed", 1, None, at_first=True)
    with MemoryPlugin(f"{max(plain_peaks)}B") as memory:
        trained, peaks, predicted = train("zeroed", 1, memory, at_first=True)
        state = memory.state_dict()
    assert trained == expected
    assert max(peaks) <= max(plain_peaks)
    with MemoryPlugin(f"{max(plain_peaks)}B") as memory:
        memory.load_state_dict(json.loads(json.dumps(state)))
        trained, peaks, predicted_again = train("zeroed", 1, memory, at_first=True)
    assert trained == expected
    assert predicted_again[-1] == predicted[-1] == max(peaks)


def test_only_backward_adds_to_them() -> None:
    """Those of another model stay, whoever writes to them between the steps."""
    gc.collect()
    gc.freeze()
    torch.manual_seed(0)
    mine, other = tied(), tied()
    x = torch.randn(24, 200)
    with MemoryPlugin("1GiB", policy="all-swap", module=mine) as memory, LiveStorageTracker() as tracker:
        memory_of_other = [torch.zeros_like(p) for p in other.parameters()]
        for parameter, gradient in zip(other.parameters(), memory_of_other, strict=True):
            parameter.grad = gradient
        both = torch.optim.SGD([*mine.parameters(), *other.parameters()], 0.1)
        for i in range(NUM_STEPS):
            tracker.register_all()
            with tracker.window() as window, memory.step(x):
                mine(x).square().mean().backward()
            both.step()
            nn.utils.clip_grad_norm_([*mine.parameters(), *other.parameters()], 1.0)
            both.zero_grad(set_to_none=False)
            if i > 4:
                predicted = memory.report(of_last=True).predicted_peak_bytes
                assert predicted is not None
                assert abs(window.peak_bytes - predicted) <= FEW_BYTES


def test_a_lazy_parameter_that_is_not_used_has_none() -> None:
    """Before it has a shape."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(32, 64), nn.Linear(64, 8), nn.LazyLinear(8)])
    x = torch.randn(16, 32)
    with MemoryPlugin("64MiB", module=model) as memory:
        for _ in range(5):
            with memory.step(x):
                model[1](model[0](x).tanh()).square().mean().backward()
            model[:2].zero_grad()
        assert memory.report().phase == "planned"


def test_no_hook_outlives_the_recorded_step() -> None:
    """Nor one whose backward fails, whoever holds the error."""
    model, x = tied(), torch.randn(24, 200)

    def hooks() -> int:
        return sum(len(p._post_accumulate_grad_hooks or ()) for p in model.parameters())

    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            assert hooks() > 0
            raise RuntimeError("no gradient")

    errors: list[BaseException] = []
    with MemoryPlugin("64MiB", policy="all-swap") as memory:
        for _ in range(3):
            with pytest.raises(RuntimeError, match="no gradient") as caught, memory.step(x):
                Failing.apply(model[0](x)).square().mean().backward()
            errors.append(caught.value)
            assert hooks() == 0
        for _ in range(4):
            with memory.step(x):
                model(x).square().mean().backward()
            model.zero_grad()
        assert memory.report().phase == "planned"
        assert hooks() == 0
