"""Which kernel CUDA computes attention with, and what surrounds the call.

What decides is whether there is a fused one: without, all scores are there at once. Of the fused ones two stand for
all; for cuDNN's stands flash attention, which saves the same but for seeds. The rules are those of
``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp``, ``sdp_utils_cpp.h`` and ``attention.cpp`` above it, as far as
they tell a fused kernel from none. Shortfalls: widths and masks are not padded, and cuDNN's kernel for keys that heads
share under a mask is none.
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

    FLASH = "flash attention"
    EFFICIENT = "memory-efficient attention"
    MATH = "one op after another"


def kernel_for(
    capability: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
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
        is_causal: Whether each position sees those before it alone.
        enable_gqa: Whether several heads of queries may share one of keys.
    """
    if not _are_rows(query, key, value) or (mask is not None and mask.stride(-1) != 1):
        return Kernel.MATH
    shares_keys = len({tensor.shape[1] for tensor in (query, key, value)}) > 1
    if shares_keys and (not enable_gqa or key.shape[1] != value.shape[1] or query.shape[1] % key.shape[1]):
        return Kernel.MATH
    is_square = not is_causal or query.shape[2] == key.shape[2]
    if mask is None and is_square and _suits_flash(capability, query, key, value):
        return Kernel.FLASH
    return Kernel.EFFICIENT if not shares_keys and _suits_efficient(capability, query, key, value) else Kernel.MATH


def _are_rows(*tensors: Tensor) -> bool:
    if any(tensor.dim() != 4 or not tensor.numel() or tensor.stride(3) != 1 for tensor in tensors):
        return False
    return len({tensor.dtype for tensor in tensors}) == 1 and len({tensor.shape[0] for tensor in tensors}) == 1


def _suits_flash(capability: int, query: Tensor, *others: Tensor) -> bool:
    is_on = torch.backends.cuda.flash_sdp_enabled() or torch.backends.cuda.cudnn_sdp_enabled()
    width = query.shape[3]
    are_alike = all(tensor.shape[3] == width for tensor in others)
    return is_on and capability >= 80 and query.dtype in _HALVES and width <= 256 and are_alike


def _suits_efficient(capability: int, query: Tensor, key: Tensor, value: Tensor) -> bool:
    is_half = query.dtype in _HALVES
    if capability < 50 or not (is_half or query.dtype is torch.float32):
        return False
    if not torch.backends.cuda.mem_efficient_sdp_enabled() or (query.dtype is torch.bfloat16 and capability < 80):
        return False
    alignment = 1  # tensor cores take 128 bits at a time
    if capability >= 80 or (capability >= 70 and is_half):
        alignment = 8 if is_half else 4
    widths = (query.shape[3], value.shape[3])
    return key.shape[3] == query.shape[3] and not any(width % alignment for width in widths)


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
    kernel = kernel_for(capability, query, key, value, attn_mask, is_causal=is_causal, enable_gqa=enable_gqa)
    mask = _added(attn_mask, query.dtype)
    out: Tensor
    if kernel is Kernel.MATH:
        out = _aten._scaled_dot_product_attention_math(
            query, key, value, mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
        )[0]
    elif kernel is Kernel.FLASH:
        out = _aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
    else:
        keeps_sums = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
        if mask is not None:
            mask = mask.expand(*query.shape[:3], key.shape[2])
        out = _aten._scaled_dot_product_efficient_attention(
            query, key, value, mask, keeps_sums, dropout_p, is_causal, scale=scale
        )[0]
    return out


def _added(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A mask as what is added to the scores."""
    if mask is None or mask.dtype is not torch.bool:
        return mask
    return torch.where(mask.logical_not(), float("-inf"), torch.scalar_tensor(0.0, dtype=dtype))
