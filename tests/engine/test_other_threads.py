"""What other threads do while a step is under way is not the step's: neither its plan nor its bits mind."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_offload import MemoryPlugin

NUM_STEPS = 6


class _Own(torch.autograd.Function):
    """A backward of the program's own: some ops, and a write."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        made = (x.sin() + gradient).cos()
        made.add_(1.0)
        return made.exp()


def _other_training() -> None:
    weight = nn.Parameter(torch.ones(16, 16))
    _Own.apply(weight.sin()).sum().backward()  # type: ignore[no-untyped-call]


def _run(memory: MemoryPlugin | None, *, is_disturbed: bool) -> list[bytes]:
    torch.manual_seed(0)
    weight, x, found = nn.Parameter(torch.randn(128, 128) * 0.1), torch.randn(256, 128), []
    for _ in range(NUM_STEPS):
        with memory.step(x) if memory is not None else contextlib.nullcontext():
            h = (x @ weight).sin()
            if is_disturbed:
                other = threading.Thread(target=_other_training)
                other.start()
                other.join()
            h = (h @ weight).exp().tanh()
            h.square().mean().backward()
        assert weight.grad is not None
        found.append(weight.grad.numpy().tobytes())
        weight.grad = None
    return found


@pytest.mark.parametrize("engine", ["native", "python"])
@pytest.mark.parametrize("policy", ["all-recompute", "all-swap"])
def test_a_training_in_another_thread_is_no_part_of_the_step(
    policy: str, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is neither recorded nor followed, though it runs in the midst of forward."""
    if engine == "python":
        monkeypatch.setenv("LIGHTNING_OFFLOAD_ENGINE", "python")
    expected, reports = _run(None, is_disturbed=False), []
    for is_disturbed in (False, True):
        with MemoryPlugin(policy=policy, device="cpu") as memory:
            assert _run(memory, is_disturbed=is_disturbed) == expected
            reports.append(memory.report())
    for report in reports:
        assert report.planned is not None
        assert (report.phase, report.num_deviations) == ("planned", 0)
    alone, disturbed = (report.planned.graph for report in reports if report.planned is not None)
    assert [op.name for op in alone.ops] == [op.name for op in disturbed.ops]


def _written_after_it_was_read(x: Tensor, weight: Tensor, write: Any) -> Tensor:
    a = (x @ weight).sin().detach()
    b = a + x @ weight  # reads it and saves nothing of it
    write(a)
    return (b.tanh() * 2).sum()


def _written_before_it_is_read(x: Tensor, weight: Tensor, write: Any) -> Tensor:
    h = (x @ weight).tanh()
    mask = h.detach().abs()
    write(mask)
    return (h * mask).square().sum()


def _written_before_it_is_saved(x: Tensor, weight: Tensor, write: Any) -> Tensor:
    h = (x @ weight) * 1
    write(h)
    return h.sin().sum()


@pytest.mark.parametrize("engine", ["native", "python"])
@pytest.mark.parametrize("policy", ["all-recompute", "all-swap"])
@pytest.mark.parametrize("first", [0, 4])
@pytest.mark.parametrize(
    "forward", [_written_after_it_was_read, _written_before_it_is_read, _written_before_it_is_saved]
)
def test_what_another_thread_writes_is_seen_by_its_version(
    forward: Any, first: int, policy: str, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the midst of forward, in place, from some step on: what was to be made again is not, or from what it was."""
    if engine == "python":
        monkeypatch.setenv("LIGHTNING_OFFLOAD_ENGINE", "python")
    found: list[list[Tensor]] = []
    for memory in (None, MemoryPlugin(policy=policy, device="cpu")):
        torch.manual_seed(0)
        weight, gradients = nn.Parameter(torch.randn(32, 32) * 0.1), list[Tensor]()
        with memory or contextlib.nullcontext():
            for step in range(NUM_STEPS + 2):
                x = torch.randn(16, 32, generator=torch.Generator().manual_seed(step))

                def write(tensor: Tensor, step: int = step) -> None:
                    if step >= first:
                        other = threading.Thread(target=tensor.mul_, args=(0.5,))
                        other.start()
                        other.join()

                with memory.step(x) if memory is not None else contextlib.nullcontext():
                    forward(x, weight, write).backward()
                assert weight.grad is not None
                gradients.append(weight.grad.clone())
                weight.grad = None
        found.append(gradients)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
