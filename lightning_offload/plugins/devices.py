"""Which device a step computes on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from lightning_offload.errors import UnsupportedError


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
