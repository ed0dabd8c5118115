"""How a tensor lies on its storage, kept apart from the storage so that one storage is moved once.

``a``, ``a.t()`` and ``a[:2]`` are three geometries on one storage; expanded, strided, offset, conjugated and
negated tensors are rebuilt exactly, without copying.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

_make: Callable[..., Geometry] = tuple.__new__  # a named tuple's own takes as long as all that a tensor is asked
_PLAIN_TYPES = frozenset({Tensor, torch.nn.Parameter})
plain_data: Any = torch._C.TensorBase.data
plain_set: Any = torch._C.TensorBase.set_
plain_set_version: Any = torch._C._autograd._unsafe_set_version_counter
"""Past :class:`Tensor`'s own, and torch's, which the runtime hears of while a step is open."""


class Geometry(NamedTuple):
    """Size, stride and offset in elements, dtype, device, and the lazy conjugate and negative bits."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    conj: bool
    neg: bool

    @classmethod
    def of(cls, tensor: Tensor) -> Geometry:
        """The geometry of a strided tensor."""
        size, offset = tensor.shape, tensor.storage_offset()
        if type(tensor) not in _PLAIN_TYPES:  # a fake one may have symbols for numbers
            size, offset = torch.Size(map(int, size)), int(offset)
        return _make(
            cls, (size, tensor.stride(), offset, tensor.dtype, tensor.device, tensor.is_conj(), tensor.is_neg())
        )

    def view(self, storage: torch.UntypedStorage, base: Tensor | None = None) -> Tensor:
        """The tensor with this geometry on a storage; detached, sharing memory with it.

        Args:
            storage: The memory.
            base: A tensor of this dtype and device without lazy bits, where one is at hand; it stays as it is.
        """
        has_grad = torch.is_grad_enabled()
        if has_grad:
            torch._C._set_grad_enabled(False)  # entering no_grad would take as long as all the rest
        try:
            tensor = torch.empty(0, dtype=self.dtype, device=self.device) if base is None else plain_data.__get__(base)
            plain_set(tensor, storage, self.offset, self.size, self.stride)
            if self.conj:
                tensor = tensor.conj()
            if self.neg:
                tensor = torch._neg_view(tensor)
            return tensor
        finally:
            if has_grad:
                torch._C._set_grad_enabled(True)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one shape and dtype hold the same bits (so NaN equals NaN, 0.0 differs from -0.0).

    Both are read in place, in chunks along the first dimension when they lie on different devices.
    """
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    a, b = _as_integers(a), _as_integers(b)
    if a.device == b.device:
        return torch.equal(a, b)
    if a.dim() == 0:
        return torch.equal(a.cpu(), b.cpu())
    rows = max(1, _CHUNK_BYTES // max(1, a[:1].numel() * a.element_size()))
    chunks = zip(a.split(rows), b.split(rows), strict=True)
    return all(torch.equal(x.cpu(), y.cpu()) for x, y in chunks)


_CHUNK_BYTES = 16 << 20  # that are compared at once
_INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _as_integers(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    if tensor.is_conj():
        tensor = tensor.conj()
    if tensor.is_neg():
        tensor = torch._neg_view(tensor)
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if tensor.dtype.is_floating_point:
        tensor = tensor.view(_INTEGER_OF_SIZE[tensor.element_size()])
    return tensor
