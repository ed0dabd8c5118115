"""What tells one kind of step from another before it runs: its inputs, and autocast."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten


def step_signature(inputs: Any) -> str:
    """A key under which the step's plan is cached.

    Numbers, strings and other leaves count by type, not by value: a batch index differs in every step.

    Args:
        inputs: Any pytree of tensors and other objects.
    """
    leaves, spec = tree_flatten(inputs)
    parts = [str(spec), *map(_describe, leaves)]
    for device_type in ("cpu", "cuda"):
        if torch.is_autocast_enabled(device_type):
            parts.append(f"{device_type} autocast {torch.get_autocast_dtype(device_type)}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def _describe(leaf: Any) -> str:
    if not isinstance(leaf, Tensor):
        return type(leaf).__name__
    if leaf.is_nested:
        return f"{leaf.dtype} nested {leaf.device.type}"
    if leaf.layout is not torch.strided:
        return f"{leaf.dtype} {tuple(leaf.shape)} {leaf.layout} {leaf.device.type}"
    return f"{leaf.dtype} {tuple(leaf.shape)} {leaf.stride()} {leaf.device.type} {leaf.requires_grad}"
