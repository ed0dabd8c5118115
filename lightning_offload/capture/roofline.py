"""Models op times where nothing runs: the roofline of a device.

An op takes as long as its arithmetic at the device's peak rate or its memory traffic at the peak bandwidth,
whichever is longer (Williams et al., CACM 2009). Arithmetic is counted by torch's own flop counter, and here for
cuDNN's recurrent layers; traffic is what is read plus what is written. Shortfall: launch latency, caches and
efficiencies below peak do not count, so small ops come out too cheap and convolutions faster than any library runs
them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from lightning_offload.graph.device_spec import DeviceSpec
from lightning_offload.tensors.op_facts import OpFacts, effects


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
    """What an op has to do, on whatever device.

    Attributes:
        flops: Arithmetic operations.
        num_bytes: Bytes read and written.
    """

    flops: float
    num_bytes: int

    def seconds(self, device: DeviceSpec) -> float:
        """Modelled duration on a device."""
        return max(self.flops / device.flops_per_second, self.num_bytes / device.memory_bytes_per_second)


class WorkMeter:
    """Notes the work of each call; stands in for a clock.

    Attributes:
        work: By call, in order; none for views.
    """

    def __init__(self) -> None:
        self.work: list[Work] = []

    def __call__(self, facts: OpFacts, args: Any, kwargs: Any, out: Any) -> float:
        """Note a call; its duration is not known yet."""
        self.work.append(work_of(facts, args, kwargs, out))
        return 0.0


def work_of(facts: OpFacts, args: Any, kwargs: Any, out: Any) -> Work:
    """The work of a call, from the op, its arguments and its result."""
    did = effects(facts, args, kwargs, out)
    if not did.made:
        return Work(0.0, 0)
    num_bytes = sum(t.numel() * t.element_size() for t in (*did.read, *did.made))
    return Work(_flops(facts.name, args, kwargs, out), num_bytes)


def _flops(name: str, args: Any, kwargs: Any, out: Any) -> float:
    namespace, base = name.split(".")[:2] if name.count(".") >= 2 else ("", "")
    packet = getattr(getattr(torch.ops, namespace), base, None) if namespace else None
    if base in _RECURRENT:
        return _RECURRENT[base] * _products_of(*args)
    formula = flop_registry.get(packet)
    return float(formula(*args, **kwargs, out_val=out)) if formula is not None else 0.0


_RECURRENT = {"_cudnn_rnn": 2.0, "_cudnn_rnn_backward": 4.0}
"""Operations for each element of a weight at each step: a product and a sum, and twice that in backward."""


def _products_of(data: Tensor, weights: Sequence[Tensor], *_rest: Any) -> int:
    """How often an element of a recurrent layer's matrices is multiplied by something."""
    return data.shape[0] * data.shape[1] * sum(weight.numel() for weight in weights if weight.dim() == 2)
