"""Which kernel CUDA computes attention with, and what surrounds the call.

The rules are those of ``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp``, ``sdp_utils_cpp.h`` and
``attention.cpp`` above it; nested tensors, ROCm and an order of the program's own are left out. cuDNN is taken to be
9.15.1 or newer, as in torch's builds for CUDA 13: from there on its kernel comes first on compute capabilities 9 and
10. From torch 2.12 on it is not taken for a dropout that is no multiple of a sixteenth.
"""

from __future__ import annotations

import enum
from typing import Any

import torch
from torch import Tensor

_HALVES = (torch.float16, torch.bfloat16)
_aten: Any = torch.ops.aten


class Kernel(enum.Enum):
    """What computes attention."""

    CUDNN = "cuDNN's"
    FLASH = "flash attention"
    EFFICIENT = "memory-efficient attention"
    MATH = "one op after another"


def kernel_for(
    capability: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    dropout: float = 0.0,
    *,
    is_causal: bool = False,
    enable_gqa: bool = False,
) -> Kernel:
    """The kernel that a GPU takes, among those that are enabled (``torch.nn.attention.sdpa_kernel``).

    Args:
        capability: The GPU's compute capability, times ten.
        query: Batch, heads, length, width; the rest as ``scaled_dot_product_attention`` takes it.
        key: Of the same width.
        value: As long as the keys.
        mask: What is added to the scores, or which of them count.
        dropout: Share of the weights that is dropped.
        is_causal: Whether each position sees those before it alone.
        enable_gqa: Whether several heads of queries may share one of keys.
    """
    if not _are_dense(query, key, value) or (mask is not None and mask.stride(-1) != 1):
        return Kernel.MATH
    order = [Kernel.FLASH, Kernel.EFFICIENT]
    if capability // 10 in (9, 10):
        order.insert(0, Kernel.CUDNN)
    elif capability >= 80 and not torch.backends.cuda.math_sdp_enabled():
        order.append(Kernel.CUDNN)
    if len({tensor.shape[1] for tensor in (query, key, value)}) > 1:
        if not enable_gqa or key.shape[1] != value.shape[1] or query.shape[1] % key.shape[1]:
            return Kernel.MATH
        order.remove(Kernel.EFFICIENT)  # which has no keys that heads share
    needs_grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
    for kernel in order:
        if kernel is Kernel.CUDNN:
            is_usable = torch.backends.cuda.cudnn_sdp_enabled() and _suits_cudnn(query, key, value, mask, dropout)
        elif kernel is Kernel.FLASH:
            is_usable = (
                torch.backends.cuda.flash_sdp_enabled()
                and mask is None
                and _suits_flash(capability, query, key, value, dropout, is_causal=is_causal, needs_grad=needs_grad)
            )
        else:
            is_usable = torch.backends.cuda.mem_efficient_sdp_enabled() and _suits_efficient(
                capability, query, key, value
            )
        if is_usable:
            return kernel
    return Kernel.MATH


def _are_dense(query: Tensor, key: Tensor, value: Tensor) -> bool:
    tensors = (query, key, value)
    if any(tensor.dim() != 4 or not tensor.numel() for tensor in tensors):
        return False
    return len({tensor.dtype for tensor in tensors}) == 1 and len({tensor.shape[0] for tensor in tensors}) == 1


def _suits_cudnn(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float) -> bool:
    if mask is not None and (mask.requires_grad or mask.dim() not in (2, 4)):
        return False
    widths = (query.shape[3], value.shape[3])
    if query.dtype not in _HALVES or max(widths) > 128 or any(width % 8 for width in widths):
        return False
    is_coarse = dropout * 16 == int(dropout * 16) or torch.__version__ < "2.12"
    if not is_coarse or torch.are_deterministic_algorithms_enabled():
        return False
    is_too_short = key.shape[2] == 1 or (dropout > 0 and query.shape[2] == 1)
    return not is_too_short and max(query.shape[:2]) <= 65535 and _are_rows(query, key, value)


def _suits_flash(
    capability: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout: float,
    *,
    is_causal: bool,
    needs_grad: bool,
) -> bool:
    width = query.shape[3]
    if capability < 80 or query.dtype not in _HALVES or width > 256:
        return False
    if key.shape[3] != width or value.shape[3] != width or (is_causal and query.shape[2] != key.shape[2]):
        return False
    is_small = 86 <= capability <= 89 or capability >= 120
    if needs_grad and is_small and width > 192 and (width <= 224 or dropout > 0):
        return False
    return _are_rows(query, key, value)


def _suits_efficient(capability: int, query: Tensor, key: Tensor, value: Tensor) -> bool:
    is_half = query.dtype in _HALVES
    if capability < 50:
        return False
    if not is_half and query.dtype is not torch.float32:
        return False
    if query.dtype is torch.bfloat16 and capability < 80:
        return False
    alignment = 4 if capability >= 80 else 1
    if capability >= 80 or (capability >= 70 and is_half):  # tensor cores, which take 128 bits at a time
        alignment = max(alignment, 8 if is_half else 4)
    widths = (query.shape[3], value.shape[3])
    if key.shape[3] != query.shape[3] or any(width % alignment for width in widths):
        return False
    tensors = (query, key, value)
    is_aligned = capability < 80 or not any(tensor.storage_offset() % alignment for tensor in tensors)
    return is_aligned and all(tensor.stride(3) == 1 for tensor in tensors)


def _are_rows(*tensors: Tensor) -> bool:
    return all(tensor.stride(3) == 1 for tensor in tensors) or tensors[0].shape[3] == 1


def attend(
    capability: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """``scaled_dot_product_attention`` by the kernel that a GPU takes."""
    kernel = kernel_for(capability, query, key, value, attn_mask, dropout_p, is_causal=is_causal, enable_gqa=enable_gqa)
    keeps_sums = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
    mask = _added(attn_mask, query.dtype)
    out: Tensor
    if kernel is Kernel.MATH:
        out = _aten._scaled_dot_product_attention_math(
            query, key, value, mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
        )[0]
    elif kernel is Kernel.CUDNN:
        out = _aten._scaled_dot_product_cudnn_attention(
            query, key, value, mask, keeps_sums, dropout_p, is_causal, False, scale=scale
        )[0]
    elif kernel is Kernel.FLASH:
        width = query.shape[3]
        scale = scale if scale is not None else width**-0.5
        padded = [_padded(tensor, -width % 8) for tensor in (query, key, value)]
        out = _aten._scaled_dot_product_flash_attention(*padded, dropout_p, is_causal, False, scale=scale)[0]
        out = out if out.shape[3] == width else out[..., :width]
    else:
        if mask is not None:
            mask = _aligned(mask).expand(*query.shape[:3], key.shape[2])
        out = _aten._scaled_dot_product_efficient_attention(
            query, key, value, mask, keeps_sums, dropout_p, is_causal, scale=scale
        )[0]
    return out


def _added(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A mask as what is added to the scores."""
    if mask is None or mask.dtype is not torch.bool:
        return mask
    return torch.where(mask.logical_not(), float("-inf"), torch.scalar_tensor(0.0, dtype=dtype))


def _aligned(mask: Tensor) -> Tensor:
    """A mask whose rows begin at multiples of eight elements."""
    if mask.stride(-1) == 1 and not any(stride % 8 for stride in mask.stride()[:-1]):
        return mask
    size = mask.shape[-1]
    return _padded(mask, 8 - size % 8)[..., :size]


def _padded(tensor: Tensor, num: int) -> Tensor:
    return torch.nn.functional.pad(tensor, (0, num)) if num else tensor
