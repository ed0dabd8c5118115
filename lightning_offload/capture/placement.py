"""Which device a step is about: one device with its index, not all of its type."""

from __future__ import annotations

import torch


def indexed(device: torch.device) -> torch.device:
    """The device as the tensors on it name it: "cuda" is the current one of several, a CPU has no index."""
    if device.type == "cpu":
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator(check_available=True) if device.index is None else None
    if accelerator is None or accelerator.type != device.type:
        return device
    return torch.device(device.type, torch.accelerator.current_device_index())
