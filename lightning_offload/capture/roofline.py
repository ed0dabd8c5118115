"""Models op times where nothing runs: the roofline of a device.

An op takes as long as its arithmetic at the device's peak rate or its memory traffic at the peak bandwidth,
whichever is longer (Williams et al., CACM 2009). Arithmetic is counted by torch's own flop counter, traffic is
what is read plus what is written. Shortfall: launch latency, caches and efficiencies below peak do not count,
so small ops come out too cheap and convolutions faster than any library runs them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from lightning_offload.graph.device_spec import DeviceSpec
from lightning_offload.tensors.op_facts import OpFacts, effects


class Roofline:
    """Prices calls on a device: seconds from an op, its arguments and its result."""

    def __init__(self, device: DeviceSpec) -> None:
        self._device = device

    def __call__(self, facts: OpFacts, args: Any, kwargs: Any, out: Any) -> float:
        """Modelled duration in seconds; 0 for views."""
        read, made, _ = effects(facts, args, kwargs, out)
        if not made:
            return 0.0
        num_bytes = sum(t.numel() * t.element_size() for t in (*read, *made))
        flops = _flops(facts.name, args, kwargs, out)
        return max(flops / self._device.flops_per_second, num_bytes / self._device.memory_bytes_per_second)


def _flops(name: str, args: Any, kwargs: Any, out: Any) -> float:
    namespace, base = name.split(".")[:2] if name.count(".") >= 2 else ("", "")
    packet = getattr(getattr(torch.ops, namespace), base, None) if namespace else None
    formula = flop_registry.get(packet)
    return float(formula(*args, **kwargs, out_val=out)) if formula is not None else 0.0
