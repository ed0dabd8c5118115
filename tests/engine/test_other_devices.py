"""Results on another device than the step's do not disturb the plan, nor, if they are single numbers, recomputation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_offload import MemoryPlugin


@pytest.fixture(params=[("last", 1), ("first", 1), ("first", 2)], ids=str)
def mixed_op(request: pytest.FixtureRequest) -> Iterator[Any]:
    """An aten op that also gives a number elsewhere, as attention gives CPU seeds on CUDA, or several."""
    order, size = request.param
    name = f"lightning_offload_mixed_{order}_{size}"
    library = torch.library.Library("aten", "FRAGMENT")
    library.define(f"{name}(Tensor x) -> (Tensor, Tensor, Tensor)")

    def kernel(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        seed = torch.empty(() if size == 1 else size, dtype=torch.long, device="meta")
        return (x * 2, x.sum(-1), seed) if order == "last" else (seed, x * 2, x.sum(-1))

    library.impl(name, kernel, "CPU")
    op = getattr(torch.ops.aten, name)

    def call(x: Tensor) -> Any:
        return op(x)[:2] if order == "last" else op(x)[1:]

    call.is_recomputed = size == 1  # type: ignore[attr-defined]
    yield call
    library._destroy()


def function_of(op: Any) -> Any:
    """A differentiable function that saves what the op gives."""

    class Mixed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            doubled, total = op(x)
            ctx.save_for_backward(x, doubled, total)
            return doubled * 1

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            x, doubled, total = ctx.saved_tensors
            return gradient * doubled.sign() * 2 + x * total[:, None]

    return Mixed


@pytest.mark.parametrize("policy", ["all-swap", "all-recompute"])
def test_results_elsewhere_leave_the_step_on_its_plan(mixed_op: Any, policy: str) -> None:
    """The step is planned as usual, its structure is recognised, and gradients are those of plain autograd."""
    function = function_of(mixed_op)
    layers = torch.nn.ModuleList([torch.nn.Linear(64, 64) for _ in range(3)])
    x = torch.randn(128, 64)

    def step() -> list[Tensor]:
        layers.zero_grad()
        h = x
        for layer in layers:
            h = function.apply(layer(h)).relu()
        h.sum().backward()
        return [p.grad.clone() for p in layers.parameters() if p.grad is not None]

    expected = step()
    with MemoryPlugin(policy=policy, module=layers) as memory:
        for _ in range(5):
            with memory.step(x):
                found = step()
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        report = memory.report()
    assert report.phase == "planned"
    assert report.swapped_bytes + report.recomputed_bytes > 0
    if policy == "all-recompute":
        size = x.nbytes + x.nbytes // 64  # of what the op gives here; layers and activations are recomputed in any case
        assert report.recomputed_bytes == 3 * (2 * x.nbytes + mixed_op.is_recomputed * size)
        assert report.num_mismatched == 0
