"""Puts generators of random numbers back: the global ones, and those that objects own."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["RandomStates", "undo_generator"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomStates:
    """States of the global generators of Python, NumPy and torch, on the CPU and on every CUDA device."""

    python: Any
    numpy: Any
    torch_cpu: Tensor
    torch_cuda: tuple[Tensor, ...]

    @classmethod
    def now(cls) -> RandomStates:
        """Record the states as they are."""
        numpy: Any = sys.modules.get("numpy")
        has_cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
        return cls(
            python=random.getstate(),
            numpy=numpy.random.get_state() if numpy is not None else None,
            torch_cpu=torch.get_rng_state(),
            torch_cuda=tuple(torch.cuda.get_rng_state_all()) if has_cuda else (),
        )

    def restore(self) -> None:
        """Put the states back."""
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)
        torch.set_rng_state(self.torch_cpu)
        if self.torch_cuda:
            torch.cuda.set_rng_state_all(list(self.torch_cuda))


def undo_generator(found: Any) -> Callable[[], None] | None:
    """What puts one generator back, of torch, Python or NumPy; None for anything else."""
    if isinstance(found, torch.Generator):
        state = found.get_state()
        return lambda: _discard(found.set_state(state))
    if isinstance(found, random.Random):
        python_state = found.getstate()
        return lambda: found.setstate(python_state)
    numpy: Any = sys.modules.get("numpy")
    if numpy is None:
        return None
    if isinstance(found, numpy.random.Generator):
        bit_generator, bits = found.bit_generator, copy.deepcopy(found.bit_generator.state)
        return lambda: setattr(bit_generator, "state", bits)
    if isinstance(found, numpy.random.RandomState):
        numpy_state = found.get_state()
        return lambda: found.set_state(numpy_state)
    return None


def _discard(_: object) -> None:
    """A setter's return value is not wanted."""
