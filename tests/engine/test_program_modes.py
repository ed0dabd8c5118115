"""Dispatch modes of the program's own: calls are made again below them, whichever are on by then."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from lightning_offload import MemoryPlugin

WIDTH, NUM_STEPS, FIRST = 32, 8, 5
"""From that step on there is a mode."""


class Halved(TorchDispatchMode):
    """Rounds what products make."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an op."""
        out = func(*args, **(kwargs or {}))
        return out.bfloat16().float() if "mm" in str(func) else out


Scope = Callable[[bool], contextlib.AbstractContextManager[Any]]


def _mode(is_on: bool) -> contextlib.AbstractContextManager[Any]:
    return Halved() if is_on else contextlib.nullcontext()


def _nothing(_: bool) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext()


PLACES: dict[str, tuple[Scope, Scope, Scope]] = {
    "forward": (_nothing, _mode, _nothing),
    "backward": (_nothing, _nothing, _mode),
    "step": (_mode, _nothing, _nothing),
}
"""What surrounds the step, its forward and its backward."""


def _train(memory: MemoryPlugin | None, place: str, first: int, *, is_whole: bool) -> list[Tensor]:
    around_step, around_forward, around_backward = PLACES[place]
    torch.manual_seed(0)
    model, found = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.GELU()), list[Tensor]()
    for step in range(NUM_STEPS):
        x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(step))
        has_mode = step >= first
        with contextlib.ExitStack() as stack:
            stack.enter_context(around_step(has_mode))
            opened = memory.step(x) if memory is not None else contextlib.nullcontext()
            if is_whole:
                stack.enter_context(opened)
                opened = contextlib.nullcontext()
            with around_forward(has_mode), opened:
                loss = model(x).square().mean()
            with around_backward(has_mode):
                loss.backward()
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
    return found


@pytest.mark.parametrize("engine", ["native", "python"])
@pytest.mark.parametrize("is_whole", [True, False])
@pytest.mark.parametrize("first", [0, FIRST])
@pytest.mark.parametrize("place", PLACES)
def test_bits(place: str, first: int, is_whole: bool, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mode that changes what ops do changes what was asked of it, and nothing that is made again."""
    if engine == "python":
        monkeypatch.setenv("LIGHTNING_OFFLOAD_ENGINE", "python")
    expected = _train(None, place, first, is_whole=is_whole)
    with MemoryPlugin(policy="all-recompute", device="cpu") as memory:
        found = _train(memory, place, first, is_whole=is_whole)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


@pytest.mark.parametrize("engine", ["native", "python"])
def test_operations_are_counted_as_plainly(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is made again is not counted once more."""
    if engine == "python":
        monkeypatch.setenv("LIGHTNING_OFFLOAD_ENGINE", "python")
    counts = []
    for memory in (None, MemoryPlugin(policy="all-recompute", device="cpu")):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.GELU())
        with memory or contextlib.nullcontext():
            for _ in range(NUM_STEPS):
                x = torch.randn(16, WIDTH)
                opened = memory.step(x) if memory is not None else contextlib.nullcontext()
                with FlopCounterMode(display=False) as counter, opened:
                    model(x).square().mean().backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0
