"""Attention is computed by the kernel that CUDA chooses."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_offload.capture.cuda.attention import Kernel, kernel_for

HALF = torch.bfloat16


def heads(*shape: int, dtype: torch.dtype = torch.float32, needs_grad: bool = True) -> Tensor:
    """Queries, keys or values, without their memory."""
    return torch.empty(*shape, dtype=dtype, device="meta", requires_grad=needs_grad)


def test_kernel_by_type_width_and_gpu(subtests: pytest.Subtests) -> None:
    """Without a mask."""
    for capability, dtype, width, kernel in [
        (80, torch.float32, 64, Kernel.EFFICIENT),
        (80, torch.float32, 66, Kernel.MATH),  # not a multiple of 128 bits
        (80, torch.float64, 64, Kernel.MATH),
        (80, HALF, 64, Kernel.FLASH),
        (80, HALF, 60, Kernel.FLASH),
        (80, HALF, 256, Kernel.FLASH),
        (80, HALF, 264, Kernel.EFFICIENT),
        (75, torch.float16, 64, Kernel.EFFICIENT),
        (75, HALF, 64, Kernel.MATH),
        (90, HALF, 64, Kernel.FLASH),
        (90, torch.float32, 64, Kernel.EFFICIENT),
        (35, torch.float32, 64, Kernel.MATH),
    ]:
        with subtests.test(capability=capability, dtype=dtype, width=width):
            tensor = heads(2, 4, 32, width, dtype=dtype)
            assert kernel_for(capability, tensor, tensor, tensor) is kernel


def test_mask_rules_flash_attention_out() -> None:
    """Also one that is trained."""
    tensor, mask = heads(2, 4, 32, 64, dtype=HALF), heads(1, 1, 32, 32, dtype=HALF)
    assert kernel_for(80, tensor, tensor, tensor, mask) is Kernel.EFFICIENT


def test_lengths_and_heads() -> None:
    """Flash attention is causal between equal lengths alone; fewer heads of keys must be asked for."""
    query, key = heads(2, 4, 32, 64, dtype=HALF), heads(2, 2, 16, 64, dtype=HALF)
    longer = heads(2, 4, 16, 64, dtype=HALF)
    assert kernel_for(80, query, longer, longer) is Kernel.FLASH
    assert kernel_for(80, query, longer, longer, is_causal=True) is Kernel.EFFICIENT
    assert kernel_for(80, query, key, key) is Kernel.MATH
    assert kernel_for(80, query, key, key, enable_gqa=True) is Kernel.FLASH
    assert kernel_for(80, query[0], query[0], query[0]) is Kernel.MATH


@pytest.mark.parametrize(
    ("capability", "dtype", "kernel"),
    [
        (80, HALF, Kernel.FLASH),
        (80, torch.float32, Kernel.MATH),
        (75, torch.float16, Kernel.MATH),
        (90, HALF, Kernel.FLASH),
    ],
)
def test_keys_that_heads_share(capability: int, dtype: torch.dtype, kernel: Kernel) -> None:
    """The memory-efficient kernel has no such keys: they are repeated, and the scores are there at once."""
    query, key = heads(2, 4, 32, 64, dtype=dtype), heads(2, 2, 32, 64, dtype=dtype)
    assert kernel_for(capability, query, key, key, enable_gqa=True) is kernel
    mask = heads(1, 1, 32, 32, dtype=HALF, needs_grad=False)
    assert kernel_for(80, query, key, key, mask, enable_gqa=True) is Kernel.MATH
    assert kernel_for(80, query, key, heads(2, 1, 32, 64, dtype=dtype), enable_gqa=True) is Kernel.MATH


def test_a_mask_that_is_spread_over_keys() -> None:
    """Its last dimension has to lie in one row."""
    tensor = heads(2, 4, 32, 64)
    column = heads(2, 1, 32, 1, needs_grad=False)
    assert kernel_for(80, tensor, tensor, tensor, column.expand(2, 1, 32, 32)) is Kernel.MATH
    assert kernel_for(80, tensor, tensor, tensor, column) is Kernel.EFFICIENT


def test_what_the_program_switched_off_is_not_chosen() -> None:
    """As torch's context manager says."""
    tensor = heads(2, 4, 32, 64, dtype=HALF)
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        assert kernel_for(90, tensor, tensor, tensor) is Kernel.EFFICIENT
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        assert kernel_for(80, tensor, tensor, tensor) is Kernel.FLASH
    with sdpa_kernel(SDPBackend.MATH):
        assert kernel_for(90, tensor, tensor, tensor) is Kernel.MATH
