"""Results of kernels that CUDA alone has, or that it gives other results of, as fake tensors.

Sizes are those of the kernels' own sources under ``aten/src/ATen/native/cuda`` and ``.../cudnn``; torch's own rules for
fake tensors know those of CPUs where the tensors say that they are a CPU's, and leave out what cuDNN reserves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from lightning_offload.capture.cuda import recurrent

_aten: Any = torch.ops.aten
_HALVES = (torch.float16, torch.bfloat16)


class CudaKernels(TorchDispatchMode):
    """Answers for CUDA's kernels; to be entered inside of a fake mode, and outside of what records."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    @override
    def is_infra_mode(cls) -> bool:
        return True

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kernel = _KERNELS.get(func)
        return func(*args, **(kwargs or {})) if kernel is None else kernel(*args, **(kwargs or {}))


def _sums_of(data: Tensor) -> torch.dtype:
    """What CUDA sums up in."""
    return torch.float32 if data.dtype in _HALVES else data.dtype


def _layer_norm(data: Tensor, shape: Any, *_rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    rows = [*data.shape[: data.dim() - len(shape)], *(1 for _ in shape)]
    mean, scale = (data.new_empty(rows, dtype=_sums_of(data)) for _ in range(2))
    return torch.empty_like(data, memory_format=torch.contiguous_format), mean, scale


def _rms_norm(data: Tensor, shape: Any, *_rest: Any) -> tuple[Tensor, Tensor]:
    rows = [*data.shape[: data.dim() - len(shape)], *(1 for _ in shape)]
    return torch.empty_like(data, memory_format=torch.contiguous_format), data.new_empty(rows, dtype=_sums_of(data))


def _rms_norm_backward(
    grad: Tensor, data: Tensor, shape: Any, scale: Tensor, weight: Tensor | None, wanted: Any
) -> tuple[Tensor | None, Tensor | None]:
    return (
        torch.empty_like(data, memory_format=torch.contiguous_format) if wanted[0] else None,
        torch.empty_like(weight) if wanted[1] and weight is not None else None,
    )


def _batch_norm(
    data: Tensor, _weight: Any, _bias: Any, _mean: Any, _variance: Any, training: bool, *_rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    size = data.shape[1] if training else 0
    mean, scale = (data.new_empty(size, dtype=_sums_of(data)) for _ in range(2))
    return torch.empty_like(data), mean, scale


def _cudnn_batch_norm(
    data: Tensor, weight: Tensor, _bias: Any, _mean: Any, _variance: Any, training: bool, *_rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    size = data.shape[1] if training else 0
    return torch.empty_like(data), weight.new_empty(size), weight.new_empty(size), data.new_empty(0, dtype=torch.uint8)


def _cudnn_batch_norm_backward(
    data: Tensor, _grad: Tensor, weight: Tensor, *_rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(data), torch.empty_like(weight), torch.empty_like(weight)


def _efficient_attention(
    query: Tensor, key: Tensor, value: Tensor, _mask: Any, keeps_sums: bool, *_rest: Any, **_named: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows of sums are as long as blocks of 32 queries; seed and offset are numbers on the host."""
    batch, heads, length, _ = query.shape
    out = query.new_empty(batch, length, heads, value.shape[3]).transpose(1, 2)
    sums = query.new_empty(batch, heads, -(-length // 32) * 32 if keeps_sums else 0, dtype=torch.float32)
    return out, sums, _on_host(), _on_host()


def _efficient_attention_backward(
    _grad: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *rest: Any, **_named: Any
) -> tuple[Tensor | None, ...]:
    gradients = [
        tensor.new_empty(tensor.shape[0], tensor.shape[2], tensor.shape[1], tensor.shape[3]).transpose(1, 2)
        for tensor in (query, key, value)
    ]
    of_mask = None
    if mask is not None and rest[5][3]:
        size = mask.shape[-1]
        of_mask = mask.new_empty(*mask.shape[:-1], -(-size // 16) * 16)[..., :size]
    return *gradients, of_mask


def _gradients_alike(
    _grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_rest: Any, **_named: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _flash_attention(query: Tensor, key: Tensor, _value: Tensor, *_rest: Any, **_named: Any) -> tuple[Any, ...]:
    batch, heads, length, _ = query.shape
    sums = query.new_empty(batch, heads, length, dtype=torch.float32)
    seed, unused = (query.new_empty(size, dtype=torch.uint64) for size in ((2,), ()))
    return torch.empty_like(query), sums, None, None, length, key.shape[2], seed, unused, query.new_empty(0)


def _cudnn_attention(
    query: Tensor, key: Tensor, value: Tensor, _mask: Any, keeps_sums: bool, *_rest: Any, **_named: Any
) -> tuple[Any, ...]:
    batch, heads, length, _ = query.shape
    order = sorted(range(4), key=lambda dim: query.stride(dim), reverse=True)
    out = torch.empty_permuted((batch, heads, length, value.shape[3]), order, dtype=query.dtype)
    sums = query.new_empty((batch, heads, length, 1) if keeps_sums else (0,), dtype=torch.float32)
    seed, offset = (query.new_empty((), dtype=torch.int64) for _ in range(2))
    return out, sums, None, None, length, key.shape[2], seed, offset, None


def _on_host() -> Tensor:
    """A number that is not on the device: what is on none counts as little."""
    return torch.empty((), dtype=torch.int64, device="meta")


_KERNELS: dict[Any, Callable[..., Any]] = {
    _aten.native_layer_norm.default: _layer_norm,
    _aten._fused_rms_norm.default: _rms_norm,
    _aten._fused_rms_norm_backward.default: _rms_norm_backward,
    _aten.native_batch_norm.default: _batch_norm,
    _aten.cudnn_batch_norm.default: _cudnn_batch_norm,
    _aten.cudnn_batch_norm_backward.default: _cudnn_batch_norm_backward,
    _aten._scaled_dot_product_efficient_attention.default: _efficient_attention,
    _aten._scaled_dot_product_efficient_attention_backward.default: _efficient_attention_backward,
    _aten._scaled_dot_product_flash_attention.default: _flash_attention,
    _aten._scaled_dot_product_flash_attention_backward.default: _gradients_alike,
    _aten._scaled_dot_product_cudnn_attention.default: _cudnn_attention,
    _aten._scaled_dot_product_cudnn_attention_backward.default: _gradients_alike,
    _aten._cudnn_rnn.default: recurrent.cudnn_rnn,
    _aten._cudnn_rnn_backward.default: recurrent.cudnn_rnn_backward,
    _aten._thnn_fused_gru_cell.default: recurrent.gru_cell_kernel,
    _aten._thnn_fused_gru_cell_backward.default: recurrent.gru_cell_backward,
}
