"""A copy that fails is nobody's memory: what it was to fill is neither read nor taken for a copy."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from lightning_offload import MemoryPlugin
from lightning_offload.errors import SpillError
from lightning_offload.runtime.lanes import Copy
from lightning_offload.runtime.materialize import Materializer
from lightning_offload.runtime.tiers import Tiers

NUM_STEPS = 4
"""The last one is under the final plan."""
LARGE = 9 << 20
"""Numbers, 36 MiB: malloc takes more than 32 from the system, so what nobody filled is zeros."""


@pytest.fixture(params=["native", "python"], autouse=True)
def each_engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run planned steps in it; in Python twice where there is no compiler."""
    if request.param == "python":
        monkeypatch.setenv("LIGHTNING_OFFLOAD_ENGINE", "python")


@contextlib.contextmanager
def failing_once(name: str) -> Iterator[None]:
    """Have the next call of a function of `os` fail."""
    real, num_left = getattr(os, name), [1]

    def call(*args: Any) -> Any:
        if num_left[0]:
            num_left[0] -= 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(*args)

    with mock.patch.object(os, name, call):
        yield
    assert not num_left[0], "nothing called it"


def test_a_value_that_was_not_read_back_is_read_again(tmp_path: Path) -> None:
    """A retained graph goes on after the error with plain PyTorch's bits."""
    weight, x = nn.Parameter(torch.randn(LARGE)), torch.randn(LARGE)

    def forward() -> Tensor:
        return (x * weight).sin().sum()

    forward().backward()
    assert weight.grad is not None
    expected, weight.grad = weight.grad, None
    with MemoryPlugin(device="cpu", policy="all-swap", tier="disk", spill_dir=tmp_path) as memory:
        for step in range(NUM_STEPS):
            with memory.step(x):
                loss = forward()
                if step == NUM_STEPS - 1:
                    with failing_once("preadv"), pytest.raises(SpillError):
                        loss.backward(retain_graph=True)
                    weight.grad = None
                loss.backward()
            assert torch.equal(weight.grad, expected)
            weight.grad = None


class _Failing(Copy):
    """A copy out that is under way, and will not come to a good end."""

    def __init__(self) -> None:
        self.num_waits = 0

    @property
    def is_done(self) -> bool:
        return False

    def wait(self) -> float:
        self.num_waits += 1
        raise SpillError("no room")

    def synchronize(self) -> None:
        pass


def test_a_write_goes_on_where_the_copy_before_it_fails() -> None:
    """The tensor is on the device still, and the program hears of nothing."""
    torch.manual_seed(0)
    first, weight = (nn.Parameter(torch.randn(512, 512)) for _ in range(2))
    x, failing = torch.randn(512, 512), _Failing()

    def run(memory: MemoryPlugin | None) -> list[bytes]:
        found = []
        for step in range(NUM_STEPS):
            is_last = step == NUM_STEPS - 1
            with contextlib.ExitStack() as stack:
                if memory is not None:
                    stack.enter_context(memory.step(x))
                y = x * 2.0
                assert y.data.requires_grad is False  # after which ops of later steps are seen
                if is_last and memory is not None:
                    stack.enter_context(mock.patch.object(Tiers, "swap_out", return_value=failing))
                    stack.enter_context(mock.patch.object(Materializer, "release"))  # the write comes before that
                other = y * first  # saves it, for a backward that does not come
                if is_last:  # which is not planned for
                    y.add_(1.0)
                (y * weight).sum().backward()
                del other
            assert weight.grad is not None
            found.append(weight.grad.numpy().tobytes())
            weight.grad = None
        return found

    expected = run(None)
    with MemoryPlugin(device="cpu", policy="all-swap") as memory:
        assert run(memory) == expected
    assert failing.num_waits


class _SavesShape(torch.autograd.Function):
    """Saves a tensor of another device, as lengths of sequences are on CUDA."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(torch.empty(1000, device="meta"))
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (shape,) = ctx.saved_tensors
        assert shape.device.type == "meta"
        return gradient * 2


def _longer(h: Tensor) -> Tensor:
    return torch.cat([h, h]).exp()[: len(h)]


@pytest.mark.parametrize("policy", ["all-swap", "all-recompute"])
def test_what_lies_elsewhere_stays_there_once_a_step_has_left_its_plan(policy: str) -> None:
    """The host has no copy of another device's memory."""
    torch.manual_seed(0)
    weight, x = nn.Parameter(torch.randn(128, 128) * 0.1), torch.randn(256, 128)

    def step(memory: MemoryPlugin | None, change: Callable[[Tensor], Tensor]) -> bytes:
        with memory.step(x) if memory is not None else contextlib.nullcontext():
            h: Tensor = _SavesShape.apply(change((x @ weight).sin()))
            for _ in range(3):
                h = h.sin()
            h.sum().backward()
        assert weight.grad is not None
        found = weight.grad.numpy().tobytes()
        weight.grad = None
        return found

    changes = [*[torch.neg] * 5, _longer, torch.neg, _longer, _longer]
    expected = [step(None, change) for change in changes]
    with MemoryPlugin(device="cpu", policy=policy) as memory:
        assert [step(memory, change) for change in changes] == expected
        assert memory.report().num_deviations
