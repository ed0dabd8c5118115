"""Recurrent nets as cuDNN computes them: the call, its results, and what it keeps for backward.

The calls are those of ``aten/src/ATen/native/RNN.cpp`` and ``aten/src/ATen/native/cudnn/RNN.cpp``, without packed
sequences, which no fake tensors can make.

Note [cuDNN's reserve]: how large it is, cuDNN's documentation does not tell. In pytorch/pytorch#2895 one of 736,000,000
bytes was printed for an LSTM and one of 864,000,000 for a GRU, of models whose numbers of parameters are those of four
layers of width 320. For 25,000 steps of sequences both are, at each step, the output of each layer but the last, and
for each layer five times the width for an LSTM (its gates and its cell) and six times for a GRU, for a plain recurrence
once the width. On an H200 (torch 2.11, cuDNN 9.19) an LSTM of two layers in float32 and in bfloat16, a GRU of both
directions and a plain recurrence kept that and 256 bytes each. What dropout between layers keeps was not measured and
does not count; nor does the state of its random numbers, a few MiB that are kept from step to step.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.backends import cudnn

_aten: Any = torch.ops.aten
RELU, TANH, LSTM, GRU = range(4)
_WIDTHS_KEPT = {RELU: 1, TANH: 1, LSTM: 5, GRU: 6}
_HEAD_BYTES = 256


class Shape(NamedTuple):
    """How large a recurrence is."""

    steps: int
    batch: int
    num_layers: int
    num_directions: int
    hidden: int


def reserve_bytes(mode: int, shape: Shape, element_size: int) -> int:
    """What cuDNN keeps for backward: Note [cuDNN's reserve]."""
    per_layer = shape.steps * shape.batch * shape.hidden * shape.num_directions
    widths = shape.num_layers * _WIDTHS_KEPT[mode] + shape.num_layers - 1
    return _HEAD_BYTES + per_layer * widths * element_size


def is_acceptable(tensor: Tensor) -> bool:
    """Whether cuDNN takes such an input."""
    is_known = tensor.dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    return torch.backends.cudnn.enabled and is_known and tensor.numel() > 0


def _call(
    mode: int,
    data: Tensor,
    hx: Tensor,
    cx: Tensor | None,
    weights: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    if torch.is_autocast_enabled("cpu") and data.dtype is not torch.float64:
        dtype = torch.get_autocast_dtype("cpu")
        data, hx, cx = data.to(dtype), hx.to(dtype), cx.to(dtype) if cx is not None else None
        weights = (
            _cast_into_a_block(weights, dtype) if any(weight.dtype is not dtype for weight in weights) else weights
        )
    hidden = (hx if cx is None else cx).shape[2]
    projected = hx.shape[2] if hx.shape[2] != hidden else 0
    stride = (4 if has_biases else 2) + (1 if projected else 0)
    out = _aten._cudnn_rnn(
        data, list(weights), stride, _block_of(weights), hx, cx, mode, hidden, projected, num_layers, batch_first,
        dropout, train, bidirectional, [], None,
    )  # fmt: skip
    return out[0], out[1], out[2]


def _block_of(weights: Sequence[Tensor]) -> Tensor | None:
    """The memory that all weights lie in, looked for as torch does (``RNN.cpp``); None where they do not."""
    block = torch.empty(0, dtype=weights[0].dtype, device=weights[0].device).set_(weights[0].untyped_storage())
    num_elements = sum(weight.numel() for weight in weights)
    if block.numel() < num_elements or len({weight.untyped_storage()._cdata for weight in weights}) > 1:
        return None
    return block if block.numel() == num_elements else block[:num_elements]


def _cast_into_a_block(weights: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """What autocast makes of weights (``AutocastRNN.cpp``): casts that lie in one block, each with its gradient."""
    block = weights[0].new_empty(sum(weight.numel() for weight in weights), dtype=dtype)
    parts = block.split([weight.numel() for weight in weights])
    return [part.view(weight.shape).detach().copy_(weight) for part, weight in zip(parts, weights, strict=True)]


def lstm(data: Tensor, hx: Sequence[Tensor], params: Sequence[Tensor], *how: Any) -> tuple[Tensor, Tensor, Tensor]:
    """``aten::lstm.input`` on cuDNN."""
    return _call(LSTM, data, hx[0], hx[1], params, *how)


def plain(mode: int, data: Tensor, hx: Tensor, params: Sequence[Tensor], *how: Any) -> tuple[Tensor, Tensor]:
    """``aten::gru.input``, ``rnn_tanh.input`` and ``rnn_relu.input`` on cuDNN."""
    return _call(mode, data, hx, None, params, *how)[:2]


def lstm_cell(
    data: Tensor,
    hx: Sequence[Tensor],
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``aten::lstm_cell`` by the kernel that fuses all but the products."""
    out = _aten._thnn_fused_lstm_cell(data.matmul(w_ih.t()), hx[0].matmul(w_hh.t()), hx[1], b_ih, b_hh)
    return out[0], out[1]


def gru_cell(
    data: Tensor, hx: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None
) -> Tensor:
    """``aten::gru_cell`` by the kernel that fuses all but the products."""
    out: Tensor = _aten._thnn_fused_gru_cell(data.matmul(w_ih.t()), hx.matmul(w_hh.t()), hx, b_ih, b_hh)[0]
    return out


# ---- results


def cudnn_rnn(
    data: Tensor,
    weights: Sequence[Tensor],
    _stride: int,
    buffer: Tensor | None,
    hx: Tensor,
    cx: Tensor | None,
    mode: int,
    hidden: int,
    projected: int,
    num_layers: int,
    batch_first: bool,
    _dropout: float,
    train: bool,
    bidirectional: bool,
    _batch_sizes: Sequence[int],
    _dropout_state: Tensor | None,
) -> tuple[Tensor, ...]:
    """What ``aten::_cudnn_rnn`` makes: output, last states, reserve, and the weights as one block of memory."""
    directions = 2 if bidirectional else 1
    width = (projected or hidden) * directions
    batch, steps = data.shape[:2] if batch_first else (data.shape[1], data.shape[0])
    output = data.new_empty(steps, batch, width)
    output = output.transpose(0, 1) if batch_first else output
    shape = Shape(steps, batch, num_layers, directions, hidden)
    kept = reserve_bytes(mode, shape, data.element_size()) if train else 0
    if buffer is None:  # they do not lie in one, and are copied into one
        buffer = data.new_empty(sum(weight.numel() for weight in weights))
    last = hx.new_empty(num_layers * directions, batch, projected or hidden)
    cells = hx.new_empty(0) if cx is None else torch.empty_like(cx)
    return output, last, cells, data.new_empty(kept, dtype=torch.uint8), buffer


def cudnn_rnn_backward(
    data: Tensor,
    weights: Sequence[Tensor],
    _stride: int,
    buffer: Tensor,
    hx: Tensor,
    cx: Tensor | None,
    *rest: Any,
) -> tuple[Any, ...]:
    """What ``aten::_cudnn_rnn_backward`` makes: the gradients of all weights lie in one block."""
    wants_data, wants_hx, wants_cx, wants_weights = rest[-1]
    gradients: list[Tensor] = []
    if wants_weights:
        ends = list(itertools.accumulate(weight.numel() for weight in weights))
        block = buffer.new_empty(ends[-1])
        gradients = [
            block[end - weight.numel() : end].view(weight.shape) for end, weight in zip(ends, weights, strict=True)
        ]
    return (
        torch.empty_like(data) if wants_data else None,
        torch.empty_like(hx) if wants_hx else None,
        torch.empty_like(cx) if wants_cx and cx is not None else None,
        gradients,
    )


def gru_cell_kernel(
    input_gates: Tensor, _hidden_gates: Tensor, hx: Tensor, *_biases: Tensor | None
) -> tuple[Tensor, Tensor]:
    """What ``aten::_thnn_fused_gru_cell`` makes."""
    return torch.empty_like(hx), input_gates.new_empty(hx.shape[0], 5 * hx.shape[1])


def gru_cell_backward(grad: Tensor, workspace: Tensor, has_bias: bool) -> tuple[Tensor | None, ...]:
    """What ``aten::_thnn_fused_gru_cell_backward`` makes."""
    batch, width = workspace.shape[0], 3 * (workspace.shape[1] // 5)
    gates = (workspace.new_empty(batch, width), workspace.new_empty(batch, width), torch.empty_like(grad))
    biases = (workspace.new_empty(width), workspace.new_empty(width)) if has_bias else (None, None)
    return *gates, *biases


def flatten(module: nn.Module) -> None:
    """Lay the weights of each recurrent layer out in one block, as ``flatten_parameters`` does on CUDA.

    It leaves those in bfloat16 where they are, of which each call of cuDNN's then makes a block.
    """
    for part in module.modules():
        weights = part._flat_weights if isinstance(part, nn.RNNBase) else []
        tensors = [weight for weight in weights if weight is not None]
        is_whole = tensors and len(tensors) == len(weights) == len({id(tensor) for tensor in tensors})
        dtypes = {tensor.dtype for tensor in tensors}
        if is_whole and len(dtypes) == 1 and dtypes <= cudnn.CUDNN_TENSOR_DTYPES and is_acceptable(tensors[0]):
            block = torch.empty(sum(tensor.numel() for tensor in tensors), dtype=tensors[0].dtype)
            start = 0
            for tensor in tensors:
                tensor.data = block[start : start + tensor.numel()].view(tensor.shape)
                start += tensor.numel()
