"""Results of kernels that torch's own rules for fake tensors do not know, or know as a CPU's, as fake tensors.

Sizes are those of the kernels' own sources under ``aten/src/ATen/native/cuda`` and ``.../cudnn``. Attention and RMS
norm are torch's to answer for. Shortfall: seeds of memory-efficient attention, which are on the host, count as if not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_offload.capture.cuda import recurrent
from lightning_offload.capture.known_values import BesideFakes

_aten: Any = torch.ops.aten


class CudaKernels(BesideFakes):
    """Answers for CUDA's kernels."""

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _KERNELS.get(func, func)(*args, **(kwargs or {}))


def _sums_of(data: Tensor) -> torch.dtype:
    """What CUDA sums up in."""
    return torch.float32 if data.dtype in (torch.float16, torch.bfloat16) else data.dtype


def _layer_norm(data: Tensor, shape: Any, *_rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    rows = [*data.shape[: data.dim() - len(shape)], *(1 for _ in shape)]
    mean, scale = (data.new_empty(rows, dtype=_sums_of(data)) for _ in range(2))
    return torch.empty_like(data, memory_format=torch.contiguous_format), mean, scale


def _batch_norm(
    data: Tensor, _weight: Any, _bias: Any, _mean: Any, _variance: Any, training: bool, *_rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    size = data.shape[1] if training else 0
    mean, scale = (data.new_empty(size, dtype=_sums_of(data)) for _ in range(2))
    return torch.empty_like(data), mean, scale


_KERNELS: dict[Any, Callable[..., Any]] = {
    _aten.native_layer_norm.default: _layer_norm,
    _aten.native_batch_norm.default: _batch_norm,
    _aten._cudnn_rnn.default: recurrent.cudnn_rnn,
    _aten._cudnn_rnn_backward.default: recurrent.cudnn_rnn_backward,
    _aten._thnn_fused_gru_cell.default: recurrent.gru_cell_kernel,
    _aten._thnn_fused_gru_cell_backward.default: recurrent.gru_cell_backward,
}
