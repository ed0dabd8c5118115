"""Autocasts fake CPU tensors by CUDA's lists: what a CPU's leave out, above all functions that need float32.

Which functions are cast is asked of torch. How is that of ``aten/src/ATen/autocast_mode.h``: those that take the type
of their result as an argument are given float32; those below go in half precision or in the widest type; all others in
float32. Shortfall: a CPU's own few more functions in float32 (``avg_pool3d``, ``grid_sampler``, those of ``torch.fft``)
stay so, and ``cross_entropy``, which takes a copy of float16 that CUDA's kernel goes without.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from lightning_offload.capture.cuda.overrides import in_this_thread, overload_of, replacing

_KEY = "AutocastCPU"
_CUDA_KEY = "AutocastCUDA"
_HERE = torch._C.DispatchKey.AutocastCPU
_AUTOCAST = torch._C.DispatchKeySet(_HERE)
_HALVES = (torch.float16, torch.bfloat16)

_IN_HALF = frozenset(
    {
        "_convolution", "convolution", "cudnn_convolution", "cudnn_convolution_transpose", "addmv", "addr", "mv",
        "einsum", "chain_matmul", "linalg_multi_dot", "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell", "lstm_cell",
        "gru_cell", "rnn_tanh_cell", "rnn_relu_cell", "_scaled_dot_product_flash_attention",
    }
)  # fmt: skip
_IN_WIDEST = frozenset(
    {"addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "index_put", "tensordot", "scatter_add"}
)
"""Those whose arguments have to have one type: float32 where any of them has."""


_casts: dict[int, tuple[Tensor, Tensor]] = {}
"""Parameters and what they are in half precision.

As with torch's own, casts are kept until no autocast is left: a cell casts its weights once, not at each step.
"""


@contextlib.contextmanager
def casting() -> Iterator[None]:
    """Inside, this thread's autocast on a CPU is CUDA's; not for two threads at once."""
    lacking = {name: _below(_caster_for(name)) for name in cast_on(_CUDA_KEY) - cast_on(_KEY)}
    autocast: Any = torch.amp.autocast_mode.autocast
    leave = autocast.__exit__
    with replacing(_KEY, lacking, _uncast):
        try:
            autocast.__exit__ = functools.wraps(leave)(in_this_thread(_forgetting(leave), leave))
            yield
        finally:
            autocast.__exit__ = leave
            _casts.clear()


def cast_on(key: str) -> set[str]:
    """The overloads of aten's that torch casts under a dispatch key."""
    registered: list[str] = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    return {name.removeprefix("aten::") for name in registered if name.startswith("aten::")}


def _caster_for(name: str) -> Callable[..., Any]:
    if name in _IN_HALF:
        return _cast(name, lambda _: torch.get_autocast_dtype("cpu"))
    if name in _IN_WIDEST:
        return _cast(name, _widest)
    if any(argument.name == "dtype" for argument in overload_of(name)._schema.arguments):
        return _cast_within(name)
    return _cast(name, lambda _: torch.float32)


def _forgetting(leave: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Any, *args: Any) -> Any:
        left = leave(self, *args)
        torch.autocast_increment_nesting()
        if torch.autocast_decrement_nesting() == 0:
            _casts.clear()
        return left

    return call


def _uncast(plain: Any) -> Callable[..., Any]:
    """A call goes on as if there were no kernel, autocast included."""
    return lambda keys, *args, **kwargs: plain.redispatch(keys.remove(_HERE), *args, **kwargs)


def _below(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose own calls are not cast."""

    def call(_keys: Any, *args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
            return function(*args, **kwargs)

    return call


def _is_eligible(item: Any) -> bool:
    return isinstance(item, Tensor) and item.is_floating_point() and item.dtype is not torch.float64


def _widest(arguments: Any) -> torch.dtype:
    types = {item.dtype for item in tree_leaves(arguments) if _is_eligible(item)}
    return torch.float32 if torch.float32 in types else torch.get_autocast_dtype("cpu")


def _cast(name: str, dtype_for: Callable[[Any], torch.dtype]) -> Callable[..., Any]:
    plain = overload_of(name)

    def call(*args: Any, **kwargs: Any) -> Any:
        wanted = dtype_for((args, kwargs))
        args, kwargs = tree_map(lambda item: _in(item, wanted) if _is_eligible(item) else item, (args, kwargs))
        return plain(*args, **kwargs)

    return call


def _in(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    is_kept = tensor.dtype is torch.float32 and dtype is not torch.float32 and tensor.requires_grad
    if not is_kept or not tensor.is_leaf or tensor._is_view() or not torch.is_autocast_cache_enabled():
        return tensor.to(dtype)
    if id(tensor) not in _casts:
        _casts[id(tensor)] = tensor, tensor.to(dtype)
    return _casts[id(tensor)][1]


def _cast_within(name: str) -> Callable[..., Any]:
    plain = overload_of(name)
    place = next(i for i, argument in enumerate(plain._schema.arguments) if argument.name == "dtype")

    def call(*args: Any, **kwargs: Any) -> Any:
        is_given = kwargs.get("dtype") is not None or (len(args) > place and args[place] is not None)
        if not is_given and args[0].dtype in _HALVES:
            args, kwargs = args[:place], {**kwargs, "dtype": torch.float32}
        return plain(*args, **kwargs)

    return call
