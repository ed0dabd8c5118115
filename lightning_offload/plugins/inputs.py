"""What a step is given, as leaves: also of batches that torch's pytree takes for one.

Those are mappings (``BatchEncoding``), data classes, and what moves to a device by a method ``to`` of its own, as
Lightning and Accelerate move it (batches of graphs).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

_DEEPEST = 4
"""Objects within one another that are opened: a batch of graphs has a store, which has a mapping."""

_CLOSED = frozenset({int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size})


def flatten(inputs: Any, depth: int = _DEEPEST) -> tuple[list[Any], str]:
    """The leaves of what a step is given, and how these are nested.

    Args:
        inputs: Any pytree of tensors and other objects.
        depth: How many objects within one another are opened.
    """
    leaves, spec = tree_flatten(inputs)
    opened = [_opened(leaf) for leaf in leaves] if depth else []
    if all(found is None for found in opened):
        return leaves, str(spec)
    parts = [leaf if found is None else found for leaf, found in zip(leaves, opened, strict=True)]
    leaves, within = flatten(parts, depth - 1)
    return leaves, f"{spec} {within}"


def _opened(leaf: Any) -> dict[Any, Any] | None:
    """What an object holds, where it is a batch or a part of one."""
    kind = type(leaf)
    if kind in _CLOSED or isinstance(leaf, (Tensor, type, torch.nn.Module)):
        return None
    if isinstance(leaf, Mapping):
        return dict(leaf)
    if dataclasses.is_dataclass(kind) or callable(getattr(kind, "to", None)):
        return dict(getattr(leaf, "__dict__", {}))
    return None
