"""Functions that torch composes of others, composed as on CUDA.

Each takes the place of torch's own for CPU tensors, in the thread and for the time of :func:`choosing`, wherever it is
called from, C++ included. Sources, all in ``aten/src/ATen/native``: ``Dropout.cpp`` (a mask of one byte an element),
``layer_norm.cpp`` (RMS norm is one kernel), ``RNN.cpp``, and those of :mod:`~.attention`. Batch norms stay as they are:
cuDNN's save the same. Shortfall: a softmax of float16 in float32 takes a copy, which CUDA's goes without.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format
from typing_extensions import override

from lightning_offload.capture.cuda import recurrent
from lightning_offload.capture.cuda.attention import attend
from lightning_offload.capture.cuda.overrides import overload_of, replacing

_aten: Any = torch.ops.aten
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_CHANNELS_LAST = (torch.channels_last, torch.channels_last_3d)


@contextlib.contextmanager
def choosing(capability: int) -> Iterator[None]:
    """Inside, this thread's composed functions of fake CPU tensors call what they would call on CUDA.

    Args:
        capability: The GPU's compute capability, times ten.
    """
    table: dict[str, Callable[..., Any]] = {
        **_TABLE,
        "scaled_dot_product_attention": functools.partial(attend, capability),
    }
    with replacing("AutogradCPU", {name: _chosen(name, function) for name, function in table.items()}, _composed):
        yield


def _composed(plain: Any) -> Callable[..., Any]:
    return lambda _keys, *args, **kwargs: plain._op_dk(_COMPOSITE, *args, **kwargs)


def _chosen(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    composed = _composed(overload_of(name))

    def choose(keys: Any, *args: Any, **kwargs: Any) -> Any:
        made = function(*args, **kwargs)
        return composed(keys, *args, **kwargs) if made is NotImplemented else made

    return choose


def _dropout(data: Tensor, p: float, train: bool) -> Any:
    is_fused = train and 0 < p < 1 and data.numel() > 0
    return _aten.native_dropout(data, p, True)[0] if is_fused else NotImplemented


def _rms_norm(data: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None) -> Any:
    if (weight is not None and weight.dtype is not data.dtype) or suggest_memory_format(data) in _CHANNELS_LAST:
        return NotImplemented
    return _FusedRMSNorm.apply(data, list(shape), weight, eps)  # type: ignore[no-untyped-call]


class _FusedRMSNorm(torch.autograd.Function):
    """The fused kernel with its gradient, which torch has for CUDA's tensors alone."""

    @staticmethod
    @override
    def forward(ctx: Any, data: Tensor, shape: list[int], weight: Tensor | None, eps: float | None) -> Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            out, scale = _aten._fused_rms_norm(data, shape, weight, eps)
        ctx.shape = shape
        ctx.save_for_backward(data, weight, scale)
        return out  # type: ignore[no-any-return]

    @staticmethod
    @override
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        data, weight, scale = ctx.saved_tensors
        wanted = [ctx.needs_input_grad[0], weight is not None and ctx.needs_input_grad[2]]
        with torch._C._AutoDispatchBelowAutograd():
            made = _aten._fused_rms_norm_backward(gradients[0], data, ctx.shape, scale, weight, wanted)
        return made[0], None, made[1] if wanted[1] else None, None


def _on_cudnn(function: Callable[..., Any]) -> Callable[..., Any]:
    """A recurrence where cuDNN takes its input."""

    @functools.wraps(function)
    def run(data: Tensor, *args: Any) -> Any:
        return function(data, *args) if recurrent.is_acceptable(data) else NotImplemented

    return run


def _plain(mode: int) -> Callable[..., Any]:
    return _on_cudnn(functools.wraps(recurrent.plain)(functools.partial(recurrent.plain, mode)))


_TABLE: dict[str, Callable[..., Any]] = {
    "dropout": _dropout,
    "rms_norm": _rms_norm,
    "lstm.input": _on_cudnn(recurrent.lstm),
    "gru.input": _plain(recurrent.GRU),
    "rnn_tanh.input": _plain(recurrent.TANH),
    "rnn_relu.input": _plain(recurrent.RELU),
    "lstm_cell": recurrent.lstm_cell,
    "gru_cell": recurrent.gru_cell,
}
