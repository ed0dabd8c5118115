"""Which device a step computes on, and how fast its links are."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from lightning_offload.capture.calibrate import measure_device
from lightning_offload.errors import UnsupportedError
from lightning_offload.graph.device_spec import DeviceSpec
from lightning_offload.runtime.host_pool import HostPool
from lightning_offload.runtime.lanes import Lanes, lanes_for


def find_device(module: torch.nn.Module | None, inputs: Any) -> torch.device:
    """The device of the module's parameters, else of the inputs, else CUDA where it is in use, else the CPU."""
    parameter = next(module.parameters(), None) if module is not None else None
    found = parameter.device if parameter is not None else first_device(inputs)
    if found is not None:
        return found
    on_cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
    return torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu")


def first_device(inputs: Any) -> torch.device | None:
    """The device of the first tensor among the inputs, one that is not on the CPU where there is any."""
    devices = [leaf.device for leaf in tree_flatten(inputs)[0] if isinstance(leaf, Tensor)]
    return next((d for d in devices if d.type != "cpu"), devices[0] if devices else None)


def supported(device: torch.device | str) -> torch.device:
    """The device, checked.

    Raises:
        UnsupportedError: Neither a CPU nor CUDA.
    """
    try:
        device = torch.device(device)
    except (RuntimeError, TypeError):
        raise UnsupportedError(f"device {device!r} is not known: use 'cpu' or 'cuda'") from None
    if device.type not in ("cpu", "cuda"):
        raise UnsupportedError(f"device {str(device)!r} is not supported: use 'cpu' or 'cuda'")
    return device


_LINK_BLOCK_BYTES = 32 << 20


def measure_links(device: torch.device, lanes: Lanes | None) -> DeviceSpec:
    """Measure a device through its lanes, or through lanes of its own where there are none."""
    block = HostPool().allocate(_LINK_BLOCK_BYTES)
    assert block is not None
    used = lanes if lanes is not None else lanes_for(device)
    try:
        return measure_device(
            device,
            lambda storage: used.swap_out(storage, block).wait(),
            lambda storage: used.swap_in(block, storage).wait(),
            num_bytes=_LINK_BLOCK_BYTES,
        )
    finally:
        if lanes is None:
            used.close()
