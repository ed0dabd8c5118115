"""Models op times where nothing runs: the roofline of a device, as far below its peaks as ops of a kind stay.

An op takes as long as its arithmetic or its memory traffic, whichever is longer (Williams et al., CACM 2009), each at
the share of the peak that a kind of work reaches on the device, and a launch (``DeviceSpec.work_seconds``). A device
without such shares gives the plain roofline. Arithmetic is counted by torch's own flop counter, and here for the ops it
does not know or counts wrongly; traffic is what is read plus what is written.

Shortfalls: caches do not count; an op's efficiency does not depend on its size, its layout or its library; ops are
those of a CPU where the step was recorded on one.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from lightning_offload.graph.device_spec import DeviceSpec
from lightning_offload.graph.work_kinds import WorkKind
from lightning_offload.tensors.op_facts import OpFacts, effects


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
    """What an op has to do, on whatever device.

    Attributes:
        flops: Arithmetic operations.
        num_bytes: Bytes read and written.
        kind: What limits it.
    """

    flops: float
    num_bytes: int
    kind: WorkKind = WorkKind.ELEMENTWISE

    def seconds(self, device: DeviceSpec) -> float:
        """Modelled duration on a device."""
        return device.work_seconds(self.kind, self.flops, self.num_bytes)


def work_of(facts: OpFacts, args: Any, kwargs: Any, out: Any) -> Work:
    """The work of a call, from the op, its arguments and its result."""
    did = effects(facts, args, kwargs, out)
    if not did.made:
        return Work(0.0, 0)
    num_bytes = sum(t.numel() * t.element_size() for t in (*did.read, *did.made))
    base = _base(facts.name)
    return Work(_flops(facts.name, args, kwargs, out), num_bytes, _kind(base, args))


_KINDS = tuple(
    (kind, re.compile(pattern))
    for kind, pattern in (
        (WorkKind.CONVOLUTION, r"conv(olution|_|\d)"),
        (WorkKind.RECURRENT, r"rnn"),
        (WorkKind.ATTENTION, r"attention"),
        (WorkKind.MATMUL, r"(^|_|add)b?mm$|linear$|^(dot|mv|addmv)$"),
        (WorkKind.REDUCTION, r"norm|softmax|pool|^(sum|mean|var|std|argmax|amax|logsumexp|prod|nll_loss)|cumsum"),
    )
)
_DEPTHWISE_GROUPS = {"convolution": 8, "_convolution": 8, "convolution_overrideable": 8, "convolution_backward": 9}
"""Positions of the number of groups; a transposed convolution's weights have the input's channels in front."""


def _kind(base: str, args: Any) -> WorkKind:
    kind = next((kind for kind, pattern in _KINDS if pattern.search(base)), WorkKind.ELEMENTWISE)
    at = _DEPTHWISE_GROUPS.get(base)
    if kind is WorkKind.CONVOLUTION and at is not None and len(args) > at:
        x = args[1] if base == "convolution_backward" else args[0]
        return WorkKind.DEPTHWISE if 1 < args[at] == x.shape[1] else kind
    return kind


def _base(name: str) -> str:
    """The name of an op without its namespace and overload."""
    parts = name.split(".")
    return (parts[1] if len(parts) > 1 else parts[0]).rstrip("_")


def _flops(name: str, args: Any, kwargs: Any, out: Any) -> float:
    own = _OWN_FLOPS.get(_base(name))
    if own is not None:
        return own(args)
    namespace, base = name.split(".")[:2] if name.count(".") >= 2 else ("", "")
    packet = getattr(getattr(torch.ops, namespace), base, None) if namespace else None
    formula = flop_registry.get(packet)
    return float(formula(*args, **kwargs, out_val=out)) if formula is not None else 0.0


def _convolution_backward(args: Any) -> float:
    """Each wanted gradient of inputs and weights takes as much as forward; torch's counter forgets the groups."""
    gradient, x, weight, *_, mask = args
    is_transposed = args[7]
    places = math.prod((x if is_transposed else gradient).shape[2:])
    return float(2 * places * x.shape[0] * weight.numel() * (bool(mask[0]) + bool(mask[1])))


def _attention(products: int, query: Any, key: Any, value: Any, *, is_causal: bool) -> float:
    """Products over all pairs of a query and a key, half of them where the kernel need not look at what comes later."""
    *batch, length, width = query.shape
    pairs = float(math.prod(batch) * length * key.shape[-2]) / (2 if is_causal else 1)
    return float(products * pairs * (width + value.shape[-1]))


def _attention_forward(at: int) -> Callable[[Any], float]:
    """Two products; the position of ``is_causal`` is given."""
    return lambda args: _attention(2, *args[:3], is_causal=len(args) > at and bool(args[at]))


def _attention_backward(at: int) -> Callable[[Any], float]:
    """Five products where forward has two: the scores are made again (Dao et al., NeurIPS 2022)."""
    return lambda args: _attention(5, *args[1:4], is_causal=len(args) > at and bool(args[at]))


def _flex_attention(products: int, args: Any, blocks: Any) -> float:
    """As causal attention, where there is a mask: how much of it a program's own mask leaves out is not known."""
    return _attention(products, *args[:3], is_causal=blocks[-2] < _NO_BLOCKS)


def _cudnn_recurrent(args: Any) -> float:
    """Every time step multiplies by all matrices of all layers."""
    data, weights = args[0], args[1]
    elements = sum(weight.numel() for weight in weights if weight.dim() == 2)
    return float(2 * data.shape[0] * data.shape[1] * elements)


def _recurrent_forward(args: Any) -> float:
    """Every time step multiplies by both matrices of the layer."""
    steps_and_batch = math.prod(args[0].shape[:-1])
    return float(2 * steps_and_batch * (args[1].numel() + args[2].numel()))


_NO_BLOCKS = 1 << 30
"""Size of the one block of an attention without a mask."""
_OWN_FLOPS: dict[str, Callable[[Any], float]] = {
    "convolution_backward": _convolution_backward,
    "_scaled_dot_product_flash_attention_for_cpu": _attention_forward(4),
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward(7),
    "_scaled_dot_product_flash_attention": _attention_forward(4),
    "_scaled_dot_product_flash_attention_backward": _attention_backward(11),
    "_scaled_dot_product_efficient_attention": _attention_forward(6),
    "_scaled_dot_product_efficient_attention_backward": _attention_backward(11),
    "_scaled_dot_product_cudnn_attention": _attention_forward(6),
    "_scaled_dot_product_cudnn_attention_backward": _attention_backward(14),
    "flex_attention": lambda args: _flex_attention(2, args, args[4]),
    "flex_attention_backward": lambda args: _flex_attention(5, args, args[9]),
    "mkldnn_rnn_layer": _recurrent_forward,
    "mkldnn_rnn_layer_backward": lambda args: 2 * _recurrent_forward(args),
    "_cudnn_rnn": _cudnn_recurrent,
    "_cudnn_rnn_backward": lambda args: 2 * _cudnn_recurrent(args),
}
"""By name: what torch's counter does not know, or counts wrongly."""
