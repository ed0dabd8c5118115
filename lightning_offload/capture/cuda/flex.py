"""Flex attention as the kernel that ``torch.compile`` makes of it, on fake CPU tensors.

A compiler cannot run there, so what is compiled runs op by op in a recording (:func:`op_by_op`). Flex attention, which
torch refuses to differentiate on a CPU, is one op with the results of CUDA's kernel: its output, and the sum and the
maximum of each row. What the program's ``score_mod`` and ``mask_mod`` compute has no memory of its own in the kernel:
they are not called. Nor has a compiled ``create_block_mask`` a mask of all pairs on its way to its blocks.

Shortfalls: tensors that a ``score_mod`` reads are not saved and get no gradient. Outside of ``torch.compile`` there is
no such kernel, all scores are there at once: that is refused.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_offload.errors import UnsupportedError


@contextlib.contextmanager
def op_by_op() -> Iterator[None]:
    """Inside, what ``torch.compile`` was given runs as it is."""
    if "torch._dynamo" not in sys.modules:  # importing it takes seconds
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


@contextlib.contextmanager
def fused() -> Iterator[None]:
    """Inside, flex attention is CUDA's kernel."""
    module: Any = importlib.import_module("torch.nn.attention.flex_attention")
    changed = {
        "create_mask": _fused_where_compiled(module.create_mask, _mask),
        "_convert_mask_to_block_mask": _fused_where_compiled(module._convert_mask_to_block_mask, _blocks),
        "flex_attention_hop": _kernel,
        "_validate_device": lambda *_: None,
        "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG": True,  # else it compiles itself
    }
    plain = {name: getattr(module, name) for name in changed}
    try:
        for name, value in changed.items():
            setattr(module, name, value)
        yield
    finally:
        for name, value in plain.items():
            setattr(module, name, value)


def _fused_where_compiled(plain: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (function if _is_compiled() else plain)(*args, **kwargs)

    return call


def _mask(_mask_mod: Any, batch: int | None, heads: int | None, queries: int, keys: int, _device: Any = None) -> Tensor:
    """``create_mask``: which pairs count, in no memory."""
    return torch.empty((), dtype=torch.bool).expand(batch or 1, heads or 1, queries, keys)


def _blocks(
    mask: Tensor, Q_BLOCK_SIZE: int, KV_BLOCK_SIZE: int, separate_full_blocks: bool = False
) -> tuple[Tensor, Tensor | None]:
    """``_convert_mask_to_block_mask``: which blocks have pairs that count, and which such pairs alone."""
    batch, heads, queries, keys = mask.shape
    shape = (batch, heads, -(-queries // Q_BLOCK_SIZE), -(-keys // KV_BLOCK_SIZE))
    partly, fully = (mask.new_empty(shape, dtype=torch.int8) for _ in range(2))
    return partly, fully if separate_full_blocks else None


def _kernel(
    query: Tensor, key: Tensor, value: Tensor, _score_mod: Any, block_mask: tuple[Any, ...], scale: float, options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    if not _is_compiled():
        raise UnsupportedError(
            "flex_attention is called outside of torch.compile, where it computes all scores one after another: "
            "call torch.compile(flex_attention), or compile the module that calls it"
        )
    made: tuple[Tensor, Tensor, Tensor] = _Flex.apply(query, key, value, block_mask, scale, options)  # type: ignore[no-untyped-call]
    return made


def _is_compiled() -> bool:
    """Whether the program called this by way of a compiled function."""
    frame = sys._getframe()
    while frame is not None:
        code = frame.f_code
        if code.co_name == "compile_wrapper" and code.co_filename.endswith("eval_frame.py"):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


class _Flex(torch.autograd.Function):
    """The kernel with its gradient."""

    @staticmethod
    @override
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, block_mask: tuple[Any, ...], scale: float, options: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        with torch._C._AutoDispatchBelowAutograd():
            out, sums, most = torch.ops.higher_order.flex_attention(
                query, key, value, _nothing, (*block_mask[:-1], _nothing), scale, options
            )
        ctx.mark_non_differentiable(most)
        tensors = [item for item in block_mask if isinstance(item, Tensor)]
        ctx.save_for_backward(query, key, value, out, sums, *tensors)
        sizes = (item for item in block_mask[:-1] if not isinstance(item, Tensor))
        ctx.how = (*sizes, _nothing), scale, options
        return out, sums, most

    @staticmethod
    @override
    def backward(ctx: Any, grad: Tensor, of_sums: Tensor | None, *_: Any) -> Any:
        query, key, value, out, sums, *_blocks = ctx.saved_tensors
        sizes, scale, options = ctx.how
        with torch._C._AutoDispatchBelowAutograd():
            made = torch.ops.higher_order.flex_attention_backward(
                query, key, value, out, sums, grad, of_sums, _nothing, _nothing, sizes, scale, options, (), ()
            )
        return *made[:3], None, None, None


def _nothing(*_: Any) -> None:
    """Stands for what the kernel has compiled in."""
