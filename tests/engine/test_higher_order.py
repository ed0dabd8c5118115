"""Operators of higher order (`torch.cond`, `map`, `scan`, `while_loop`) train in a step as plainly."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.map import map as map_over
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop

from lightning_offload import MemoryPlugin


def _chosen(h: Tensor) -> Tensor:
    found: Tensor = torch.cond(h.sum() > 0, lambda z: (z * z).sin(), lambda z: z.cos() * z, (h,))
    return found.sum()


def _mapped(h: Tensor) -> Tensor:
    found: Any = map_over(lambda z: torch.tanh(z) * z, h)
    total: Tensor = found.sum()
    return total


def _scanned(h: Tensor) -> Tensor:
    carried, found = scan(lambda c, z: (torch.tanh(c + z), c * z), torch.zeros(8), h)
    total: Tensor = found.sum() + carried.sum()
    return total


def _looped(h: Tensor) -> Tensor:
    start = (torch.zeros((), dtype=torch.long), h)
    _, found = while_loop(lambda i, _: i < 3, lambda i, z: (i + 1, torch.tanh(z) * z), start)
    total: Tensor = found.sum()
    return total


def _trained(loss_of: Callable[[Tensor, int], Tensor], memory: MemoryPlugin | None) -> list[Tensor]:
    torch.manual_seed(0)
    model, found = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), []
    with memory or contextlib.nullcontext():
        for number in range(7):
            x = torch.randn(4, 8)
            with memory.step(x) if memory is not None else contextlib.nullcontext():
                loss = loss_of(model(x), number)
                loss.backward()
            found += [loss.detach().clone(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
            model.zero_grad()
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("first", [0, 5], ids=["always", "from-a-late-step-on"])
@pytest.mark.parametrize("engine", ["native", "python"])
@pytest.mark.parametrize("operator", [_chosen, _mapped, _scanned, _looped])
def test_what_they_have_traced_is_none_of_the_steps(
    operator: Callable[[Tensor], Tensor], engine: str, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In forward torch traces the gradient of what such an operator is given: that is no backward of the step."""
    monkeypatch.setenv("LIGHTNING_OFFLOAD_ENGINE", engine)

    def loss_of(h: Tensor, number: int) -> Tensor:
        return operator(h) if number >= first else (h.sin() * h).sum()

    expected = _trained(loss_of, None)
    found = _trained(loss_of, MemoryPlugin("8GiB", policy="all-recompute"))
    assert len(found) == len(expected) == 21
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
