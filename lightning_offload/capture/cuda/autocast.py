"""Autocasts fake CPU tensors by CUDA's lists: what a CPU's leave out, above all functions that need float32.

The lists are those of ``aten/src/ATen/autocast_mode.h``. Shortfalls: a CPU's own few more functions in float32
(``avg_pool3d``, ``grid_sampler``, those of ``torch.fft``) stay so; a softmax in float16 takes a copy in float32 that
CUDA's kernel goes without.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from lightning_offload.capture.cuda.overrides import has_kernel, overload_of, replacing

_KEY = "AutocastCPU"
_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
_HALVES = (torch.float16, torch.bfloat16)

_IN_FLOAT32 = (
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "sinh",
    "tan", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus", "layer_norm", "group_norm",
    "cosine_similarity", "norm.Scalar", "norm.ScalarOpt_dim",
)  # fmt: skip
_TO_FLOAT32 = (
    "softmax.int", "log_softmax.int", "cumprod", "cumsum", "sum", "sum.dim_IntList", "linalg_vector_norm",
)  # fmt: skip
"""Those that take the type of their result as an argument: it is given them."""
_IN_HALF = (
    "addmv", "addr", "mv", "einsum", "chain_matmul", "linalg_multi_dot", "lstm_cell", "gru_cell", "rnn_tanh_cell",
    "rnn_relu_cell", "lstm.input", "gru.input", "rnn_tanh.input", "rnn_relu.input",
)  # fmt: skip


class _Caster(threading.local):
    """Whether the functions that a thread calls are cast as CUDA's."""

    is_on = False


_caster = _Caster()


@contextlib.contextmanager
def casting() -> Iterator[None]:
    """Inside, this thread's autocast on a CPU is CUDA's."""
    table = {
        **{name: _cast(name, lambda: torch.float32) for name in _IN_FLOAT32},
        **{name: _cast(name, lambda: torch.get_autocast_dtype("cpu")) for name in _IN_HALF},
        **{name: _cast_within(name) for name in _TO_FLOAT32},
    }
    lacking = {name: function for name, function in table.items() if not has_kernel(name, _KEY)}
    with replacing(_KEY, lacking):
        try:
            _caster.is_on = True
            yield
        finally:
            _caster.is_on = False


def _cast(name: str, dtype: Callable[[], torch.dtype]) -> Callable[..., Any]:
    plain = overload_of(name)

    def call(*args: Any, **kwargs: Any) -> Any:
        wanted = dtype()

        def cast(item: Any) -> Any:
            is_eligible = isinstance(item, Tensor) and item.is_floating_point() and item.dtype is not torch.float64
            return item.to(wanted) if is_eligible else item

        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
            return plain(*tree_map(cast, args), **tree_map(cast, kwargs)) if _caster.is_on else plain(*args, **kwargs)

    return call


def _cast_within(name: str) -> Callable[..., Any]:
    plain = overload_of(name)
    place = next(i for i, argument in enumerate(plain._schema.arguments) if argument.name == "dtype")

    def call(*args: Any, **kwargs: Any) -> Any:
        is_given = kwargs.get("dtype") is not None or (len(args) > place and args[place] is not None)
        if _caster.is_on and not is_given and args[0].dtype in _HALVES:
            args, kwargs = args[:place], {**kwargs, "dtype": torch.float32}
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
            return plain(*args, **kwargs)

    return call
