"""Steps whose structure changes run plainly where a device has ample room, and are swapped out where it has not."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import Tensor, nn

from lightning_offload import MemoryPlugin
from tests.gpu.device import CUDA_MARKS, DEVICE, TOLERANT, warm_up

pytestmark = [*CUDA_MARKS, TOLERANT]

MIB = 1 << 20
NUM_STEPS = 14
LARGE_STEP = 11


class Changing(nn.Module):
    """Another structure in every step, under the same input shape; one step of them can be a large one."""

    def __init__(self, large_step: int | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(256, 256)
        self.large_step = large_step
        self.step = 0
        self.swaps: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        self.swaps.append(torch._C._autograd._top_saved_tensors_default_hooks(True) is not None)
        depth = 60 if self.step == self.large_step else 4 + self.step % 5
        out: Tensor = self.linear(x[: 1024 - 32 * self.step])
        for _ in range(depth):
            out = out.sin() if self.step % 2 else out.sigmoid()
        return out


def train(
    memory: MemoryPlugin | None, *, large_step: int | None = None, wraps_backward: bool = True
) -> tuple[list[Tensor], Changing]:
    """The gradients of each step, and the model."""
    warm_up()
    torch.manual_seed(1)
    model = Changing(large_step).to(DEVICE)
    found = []
    for step in range(NUM_STEPS):
        model.step, batch = step, torch.full((1024, 256), 0.01 * step, device=DEVICE)

        def run(batch: Tensor = batch) -> None:
            with memory.step(batch) if memory is not None else contextlib.nullcontext():
                loss = model(batch).square().mean()
                if wraps_backward:
                    loss.backward()
            if not wraps_backward:
                loss.backward()

        run()
        found += [weight.grad.clone() for weight in model.parameters() if weight.grad is not None]
        model.zero_grad()
    return found, model


def check(memory: MemoryPlugin, **how: object) -> tuple[Changing, str]:
    """Train with and without a plugin: the same bits; the model, and the phase at the end."""
    expected, _ = train(None, **how)  # type: ignore[arg-type]
    with memory:
        found, model = train(memory, **how)  # type: ignore[arg-type]
        phase = memory.report().phase
    assert len(found) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    return model, phase


@pytest.mark.parametrize("wraps_backward", [True, False])
def test_what_fits_is_not_swapped(wraps_backward: bool) -> None:
    """Without a budget, on a device that has room for them many times."""
    model, phase = check(MemoryPlugin(policy="all-swap"), wraps_backward=wraps_backward)
    assert phase == "planned"
    first = model.swaps.index(False)
    assert first <= 8, model.swaps
    assert not any(model.swaps[first:]), model.swaps


def test_forwards_alone_are_not_swapped() -> None:
    """Steps without a backward have no plan either, and are left alone after three tries."""
    model = Changing().to(DEVICE)
    with MemoryPlugin() as memory:
        for step in range(5):
            model.step = step
            with memory.step(step):
                model(torch.ones(64, 256, device=DEVICE))
    assert model.swaps == [True, True, True, False, False]


def test_what_does_not_fit_is_swapped() -> None:
    """Under a budget without room to spare."""
    model, phase = check(MemoryPlugin(budget=f"{warm_up() + 14 * MIB}B", policy="all-swap"))
    assert phase in ("planned", "recording")
    assert all(model.swaps)


@pytest.mark.parametrize("wraps_backward", [True, False])
def test_no_budget_is_exceeded_twice(wraps_backward: bool) -> None:
    """After a step that turns out too large, those to come are swapped again."""
    budget_bytes = warm_up() + 36 * MIB
    memory = MemoryPlugin(budget=f"{budget_bytes}B", policy="all-swap")
    model, phase = check(memory, large_step=LARGE_STEP, wraps_backward=wraps_backward)
    assert phase in ("planned", "recording")
    assert not model.swaps[LARGE_STEP]
    assert all(model.swaps[LARGE_STEP + 1 :])


def test_what_grew_beside_them_counts() -> None:
    """Once there is less room than steps need they are swapped, and plain again when it is back."""
    torch.manual_seed(1)
    model = Changing().to(DEVICE)
    with MemoryPlugin(budget=f"{warm_up() + 32 * MIB}B", policy="all-swap") as memory:
        beside = None
        for step in range(NUM_STEPS):
            model.step, batch = step, torch.ones(1024, 256, device=DEVICE)
            if step in (10, 12):
                beside = torch.ones(24 * MIB // 4, device=DEVICE) if beside is None else None
            with memory.step(batch):
                model(batch).square().mean().backward()
    assert model.swaps[9:] == [False, True, True, False, False]


def test_running_out_of_memory_ends_it() -> None:
    """The step is repeated with everything swapped, and so are those to come."""
    torch.manual_seed(1)
    model = Changing().to(DEVICE)
    fails = [10]

    def step(batch: Tensor) -> None:
        loss = model(batch).square().mean()
        if model.step in fails:
            fails.clear()
            raise torch.OutOfMemoryError("CUDA out of memory. Not really.")
        loss.backward()

    with MemoryPlugin(policy="all-swap", module=model) as memory:
        for index in range(NUM_STEPS):
            model.step, batch = index, torch.ones(1024, 256, device=DEVICE)
            memory.run(lambda batch=batch: step(batch), batch)  # type: ignore[misc]
    assert model.swaps[9:] == [False, False, True, True, True, True]
