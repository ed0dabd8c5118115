"""Ops of an extension, honest ones and liars, as other people's kernels are."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

NAMESPACE = "offload_tests"

_library = torch.library.Library(NAMESPACE, "DEF")
ops = getattr(torch.ops, NAMESPACE)
_cache: dict[tuple[int, ...], Tensor] = {}
_calls: list[int] = [0]
LIES_FROM = [10**9]
"""The call from which on `lies_later` writes what it is given."""


def define(schema: str, kernel: object) -> None:
    """Register an op with one kernel for all devices and no formula of autograd."""
    _library.define(schema)
    _library.impl(schema.partition("(")[0], kernel, "CompositeExplicitAutograd")


def forget_cache() -> None:
    """As in a new process."""
    _cache.clear()
    _calls[0], LIES_FROM[0] = 0, 10**9


def _unseen(x: Tensor) -> Tensor:
    """The memory of a tensor past its version counter, as a kernel that is given its address has it."""
    return torch.from_dlpack(x.detach()) if not x.is_cpu else torch.from_numpy(x.detach().numpy())


def _gelu(x: Tensor, w: Tensor) -> Tensor:
    return F.gelu(x * w)


def _gelu_backward(grad: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    inner = torch.ops.aten.gelu_backward(grad, x * w)
    return inner * w, (inner * x).sum(0)


def _scales(x: Tensor, w: Tensor) -> Tensor:
    out = _gelu(x, w)
    _unseen(x).mul_(0.5)
    return out


def _counts(x: Tensor, w: Tensor) -> Tensor:
    out = _gelu(x, w)
    x.mul_(0.5)
    return out


def _turns(x: Tensor, w: Tensor) -> Tensor:
    out = _gelu(x, w)
    memory = _unseen(x)
    memory.copy_(memory.flip(0))
    return out


def _writes_last(x: Tensor, w: Tensor) -> Tensor:
    out = _gelu(x, w)
    memory = _unseen(w)
    memory[-1] += 0.25
    return out


def _cached(x: Tensor, w: Tensor) -> Tensor:
    shape = tuple(x.shape)
    if shape not in _cache:
        _cache[shape] = torch.empty_like(x)
    with torch.no_grad():
        return _cache[shape].detach().copy_(_gelu(x, w))


def _noisy(x: Tensor, w: Tensor) -> Tensor:
    return _gelu(x, w) + torch.rand_like(x)


def _lies_later(x: Tensor, w: Tensor) -> Tensor:
    _calls[0] += 1
    return _scales(x, w) if _calls[0] >= LIES_FROM[0] else _gelu(x, w)


def _into(out: Tensor, x: Tensor, w: Tensor) -> None:
    out.copy_(_gelu(x, w))


_SIGNATURE = "(Tensor x, Tensor w) -> Tensor"
HONEST = "gelu"
LIARS = {
    "scales": "it changed an argument",
    "counts": "it wrote an argument",
    "turns": "it changed an argument",
    "writes_last": "it changed an argument",
    "cached": "it returned memory",
}
"""Ops that do what their schemas do not say, and what is said of each."""

for _name, _kernel in {
    HONEST: _gelu, "scales": _scales, "counts": _counts, "turns": _turns, "writes_last": _writes_last,
    "cached": _cached, "noisy": _noisy, "lies_later": _lies_later,
}.items():  # fmt: skip
    define(f"{_name}{_SIGNATURE}", _kernel)
define("gelu_backward(Tensor grad, Tensor x, Tensor w) -> (Tensor, Tensor)", _gelu_backward)
define("into(Tensor(a!) out, Tensor x, Tensor w) -> ()", _into)
define("exchange(Tensor x, str group_name) -> Tensor", lambda x, group_name: x + 1)
define("half(Tensor x) -> Tensor", lambda x: x[: len(x) // 2])


@torch.library.custom_op(f"{NAMESPACE}::registered", mutates_args=())
def registered(x: Tensor, w: Tensor) -> Tensor:
    """An op that torch's own registry made, with the checks that it adds."""
    return _gelu(x, w)


@torch.library.triton_op(f"{NAMESPACE}::by_triton", mutates_args={})
def by_triton(x: Tensor, w: Tensor) -> Tensor:
    """An op as wrappers of Triton's kernels are registered; it calls none, for there is no compiler for the CPU."""
    return _gelu(x, w)


def at(tensor: Tensor) -> Any:
    """The memory at a tensor's address, as a kernel in C has it."""
    numbers = (ctypes.c_float * tensor.numel()).from_address(tensor.data_ptr())
    return np.ctypeslib.as_array(numbers).reshape(tensor.shape)


class ByAddress(torch.autograd.Function):
    """A function whose kernels are given addresses: nothing but the allocation of its results is dispatched."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, w: Tensor, _name: str) -> Tensor:
        """A product, rectified."""
        out = torch.empty_like(x)
        at(out)[:] = (at(x) * at(w)).clip(min=0)
        ctx.save_for_backward(x, w, out)
        return out

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        """What went through, times the other factor."""
        x, w, out = ctx.saved_tensors  # type: ignore[attr-defined]
        of_x, of_w = torch.empty_like(x), torch.empty_like(w)
        inner = at(grad.contiguous()) * (at(out) > 0)
        at(of_x)[:] = inner * at(w)
        at(of_w)[:] = (inner * at(x)).sum(0)
        return of_x, of_w, None


class ByKernel(torch.autograd.Function):
    """A function of an extension: forward by one of the ops, backward by another."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, w: Tensor, name: str) -> Tensor:
        """Run the op."""
        out = torch.empty_like(x)
        if name == "into":
            ops.into(out, x, w)
        else:
            out = getattr(ops, name)(x, w)
        ctx.save_for_backward(x, w)
        return out

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        """Run the other one."""
        x, w = ctx.saved_tensors  # type: ignore[attr-defined]
        return (*ops.gelu_backward(grad, x, w), None)
