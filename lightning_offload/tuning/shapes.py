"""The shapes of the tensors in a batch, whatever it is made of."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["shapes_in"]

_DEEP = 6
"""Objects within objects of a batch that are looked into."""


def shapes_in(found: Any, depth: int = _DEEP) -> Iterator[tuple[int, ...]]:
    """The shapes of all tensors and arrays in a batch: in mappings, sequences, and objects such as PyG's batches."""
    if isinstance(found, Tensor) and found.is_nested:
        yield from (
            shapes_in(found.unbind(), depth - 1) if found.layout is torch.strided else [tuple(found.values().shape)]
        )
    elif isinstance(found, Tensor) or type(found).__module__ == "numpy":
        yield tuple(map(int, found.shape))
    elif not depth or isinstance(found, (str, bytes, type)):
        return
    elif isinstance(found, Mapping):
        for value in found.values():
            yield from shapes_in(value, depth - 1)
    elif isinstance(found, (list, tuple)):
        for value in found:
            yield from shapes_in(value, depth - 1)
    elif dataclasses.is_dataclass(found):
        for field in dataclasses.fields(found):
            yield from shapes_in(getattr(found, field.name, None), depth - 1)
    elif hasattr(found, "__dict__"):
        yield from shapes_in(vars(found), depth - 1)
