"""A stand-in for the memory plugin that copies every saved tensor, to test the tests with."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


class CopyingMemory:
    """Packs a copy and unpacks it again: right about most programs, wrong about later writes through `.data`.

    Args:
        error: Added to each floating-point tensor that is read back.
    """

    def __init__(self, error: float = 0.0) -> None:
        self.error = error
        self.num_packed = 0
        self.num_unpacked = 0
        self.num_backwards = 0

    def attach(self, module: Any = None, device: Any = None) -> None:
        """Do nothing."""

    def detach(self) -> None:
        """Do nothing."""

    def step(self, *inputs: Any, **kwargs: Any) -> AbstractContextManager[None]:
        """Copy what is saved inside."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def backward_scope(self) -> AbstractContextManager[None]:
        """Count a backward."""
        self.num_backwards += 1
        return nullcontext()

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Run backward and count it."""
        with self.backward_scope():
            loss.backward(**kwargs)  # type: ignore[no-untyped-call]

    def _pack(self, tensor: Tensor) -> Tensor:
        self.num_packed += 1
        return tensor.detach().clone()

    def _unpack(self, packed: Tensor) -> Tensor:
        self.num_unpacked += 1
        return packed + self.error if self.error and packed.is_floating_point() else packed
