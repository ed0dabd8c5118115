"""What a program's own backward writes ends as in plain PyTorch: replays never read what was written since.

A custom backward may write a saved tensor that it was given, in any way that Python has, in some steps and not in
others: fused losses scale what they saved unless the incoming factor is 1.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

from lightning_offload import MemoryPlugin
from lightning_offload.errors import BudgetInfeasibleError, StaleInputError
from tests.shares import pairs

SIDE = 96
NUM_STEPS = 9
WRITING_STEPS = (5, 6, 8)
"""The plan in force from the fourth step on was made and verified without a write."""


def _by_pointer(x: Tensor) -> None:
    """As a Triton kernel does: past the dispatcher and every version counter."""
    for tensor in (x.detach(),):
        array = (ctypes.c_float * tensor.numel()).from_address(tensor.data_ptr())
        for i in range(0, tensor.numel(), 7):
            array[i] *= 3.0


def _by_numpy(x: Tensor) -> None:
    x.detach().numpy()[::3] *= 3.0


def _by_dlpack(x: Tensor) -> None:
    torch.utils.dlpack.from_dlpack(x.detach()).mul_(3.0)


def _by_storage(x: Tensor) -> None:
    torch.empty(0).set_(x.untyped_storage(), 0, x.shape, x.stride()).mul_(3.0)  # type: ignore[call-overload]


def _by_out(x: Tensor) -> None:
    torch.mul(x.detach(), 3.0, out=x.detach())


def _by_op(x: Tensor) -> None:
    torch.ops.aten.mul_.Tensor(x, torch.tensor(3.0))


def _by_setitem(x: Tensor) -> None:
    x[::2] = x[::2] * 3.0


def _by_inline(x: Tensor) -> None:
    x *= 3.0


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "method": lambda x: x.mul_(3.0),
    "inline": _by_inline,
    "data": lambda x: x.data.mul_(3.0),
    "detached": lambda x: x.detach().mul_(3.0),
    "slice": lambda x: x[1:5].zero_(),
    "transposed": lambda x: x.t().mul_(3.0),
    "setitem": _by_setitem,
    "out": _by_out,
    "foreach": lambda x: torch._foreach_mul_([x], 3.0),
    "op": _by_op,
    "numpy": _by_numpy,
    "dlpack": _by_dlpack,
    "pointer": _by_pointer,
    "storage": _by_storage,
}


class Net(nn.Module):
    """What the programs train, and what a step of them does to it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(SIDE, SIDE) * 0.1)
        self.bias = nn.Parameter(torch.randn(SIDE) * 0.1)
        self.register_buffer("running", torch.randn(SIDE, SIDE))
        self.running: Tensor
        self.write: Callable[[Tensor], Any] | None = None

    def is_written(self, x: Tensor) -> None:
        if self.write is not None:
            with torch.no_grad():
                self.write(x)


class _Loss(Function):
    """Writes what it saved, and what it hid from autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, net: Net, hides: bool) -> Tensor:
        ctx.net = net
        ctx.save_for_backward(x)
        ctx.hidden = x.detach() if hides else None
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (x,) = ctx.saved_tensors
        gradient = grad * 2 + 0.01 * x
        ctx.net.is_written(x if ctx.hidden is None else ctx.hidden)
        return gradient, None, None


def _saved(net: Net, x: Tensor) -> Tensor:
    """A saved tensor with a history of its own is written before others that were computed from it are read."""
    a = x @ net.weight
    b = (a * 1.5).sin()
    c = (a + net.bias).tanh() * b
    out = (c * c).cos().sum() * 0.1
    return out + _Loss.apply(a, net, False).sum()


def _shared(net: Net, x: Tensor) -> Tensor:
    """What the writer saved is what replays read."""
    a = (x @ net.weight).sin()
    frozen = a.detach() + net.bias.detach()
    b = (net.weight * frozen).tanh()
    c = (b + frozen).sigmoid()
    out = (c * c * b).sum() + (b.exp() * c.sin()).mean()
    return out + _Loss.apply(frozen.requires_grad_(), net, False).sum()


def _hidden(net: Net, x: Tensor) -> Tensor:
    """The writer writes a tensor that it kept on its own account."""
    a = (x @ net.weight).sin()
    frozen = a.detach() * 1.25
    b = (net.weight * frozen).tanh()
    c = (b + frozen).sigmoid()
    out = (c * c * b).sum() + (b.exp() * c.sin()).mean()
    return out + _Loss.apply(frozen.requires_grad_(), net, True).sum()


def _hook_on_tensor(net: Net, x: Tensor) -> Tensor:
    """A hook of a gradient writes an activation that replays read."""
    a = (x @ net.weight).sin()
    frozen = a.detach() * 1.25
    b = (net.weight * frozen).tanh()
    c = (b + frozen).sigmoid()
    out = (c * c * b).sum() + (b.exp() * c.sin()).mean()
    late = out * 1.0
    late.register_hook(lambda _: net.is_written(frozen))
    return late


def _hook_on_buffer(net: Net, x: Tensor) -> Tensor:
    """A hook of a gradient writes a buffer that replays read."""
    b = ((x @ net.weight) * net.running).tanh()
    c = (b + net.running).sigmoid()
    out = (c * c * b).sum() + (b.exp() * c.sin()).mean()
    late = out * 1.0
    late.register_hook(lambda _: net.is_written(net.running))
    return late


def _hook_on_parameter(net: Net, x: Tensor) -> Tensor:
    """An update in backward, once a gradient is there, of a parameter that replays read."""
    b = ((x @ net.weight) + net.bias).tanh()
    c = (b * net.weight.detach() + net.bias).sigmoid()
    handle: list[Any] = []

    def update(_: Tensor) -> None:
        handle.pop().remove()
        net.is_written(net.weight.data)

    handle.append(net.bias.register_post_accumulate_grad_hook(update))
    return (c * c * b).sum() + (b.exp() * c.sin()).mean() + (net.bias * 2).sum()


def _checkpointed(net: Net, x: Tensor) -> Tensor:
    """The writer runs in a part that is checkpointed, with a backward of its own inside of backward."""
    a = (x @ net.weight).sin()
    frozen = (a.detach() * 1.25).requires_grad_()
    b = (net.weight * frozen.detach()).tanh()
    c = (b + frozen.detach()).sigmoid()
    out = (c * c * b).sum() + (b.exp() * c.sin()).mean()
    return out + checkpoint(lambda t: _Loss.apply(t, net, False) * 0.5, frozen, use_reentrant=True).sum()


PROGRAMS = (
    _saved, _shared, _hidden, _hook_on_tensor, _hook_on_buffer, _hook_on_parameter, _checkpointed,
)  # fmt: skip


def _outcome(program: Callable[[Net, Tensor], Tensor], write: str, memory: MemoryPlugin | None) -> list[Any]:
    torch.manual_seed(1)
    net = Net()
    outcome: list[Any] = []
    for index in range(NUM_STEPS):
        x = torch.randn(SIDE, SIDE, generator=torch.Generator().manual_seed(index))
        net.write = WRITES[write] if index in WRITING_STEPS else None
        try:
            if memory is None:
                loss = program(net, x)
                loss.backward()
            else:
                with memory.step():
                    loss = program(net, x)
                    loss.backward()
            outcome.append(loss.item())
        except StaleInputError:
            raise
        except RuntimeError as error:
            outcome.append("modified in place" if "modified by an inplace" in str(error) else str(error))
        outcome.extend(t.detach().clone().numpy().tobytes() for t in net.state_dict().values())
        outcome.extend(p.grad.numpy().tobytes() if p.grad is not None else None for p in net.parameters())
        net.zero_grad()
    return outcome


HEIGHTS = (0.0, 0.3, 0.6)


def _name(program: Callable[[Net, Tensor], Tensor]) -> str:
    return program.__name__.strip("_").replace("_", "-")


@functools.cache
def _expected(program: Callable[[Net, Tensor], Tensor], write: str) -> list[Any]:
    """What plain PyTorch makes of it."""
    return _outcome(program, write, None)


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("program", PROGRAMS, ids=_name)
def test_backward_that_writes_is_exact(program: Callable[[Net, Tensor], Tensor], write: str) -> None:
    """The same bits, or the same error, as in plain PyTorch, in every step."""
    expected = _outcome(program, write, None)
    for policy in ("all-recompute", "all-swap"):
        with MemoryPlugin(device="cpu", policy=policy) as memory:
            assert _outcome(program, write, memory) == expected, policy


@functools.cache
def _levels(program: Callable[[Net, Tensor], Tensor]) -> tuple[int, int]:
    """The floor and the plain peak."""
    with MemoryPlugin(device="cpu", policy="all-swap") as memory:
        _outcome(program, "data", memory)
        report = memory.report()
    assert report.floor_bytes is not None
    assert report.plain_peak_bytes is not None
    return report.floor_bytes, report.plain_peak_bytes


@pytest.mark.parametrize(
    ("program", "height"),
    [pytest.param(*pair, id=f"{_name(pair[0])}-{pair[1]}") for pair in pairs(PROGRAMS, HEIGHTS, every=3)],
)
def test_backward_that_writes_is_exact_within_budgets(program: Callable[[Net, Tensor], Tensor], height: float) -> None:
    """So it is under plans that keep some values, swap some and recompute some."""
    floor_bytes, plain_bytes = _levels(program)
    budget = int(floor_bytes + height * (plain_bytes - floor_bytes))
    for write in ("data", "method", "pointer"):
        with contextlib.suppress(BudgetInfeasibleError), MemoryPlugin(budget=f"{budget}B", device="cpu") as memory:
            assert _outcome(program, write, memory) == _expected(program, write), write
            report = memory.report()
            is_roomy = budget >= (report.plain_peak_bytes or 0)  # also where what swaps all needs more to keep all
            assert report.swapped_bytes + report.recomputed_bytes > 0 or is_roomy, write
