"""Puts everything back that training steps change: tensors, plain Python state, and random states.

:class:`Memento` walks the objects below some roots (a model, its data, Lightning's loops) and remembers what is in
them: tensors by a copy in host memory, lists, dicts and attributes by their members. `restore` writes the contents back
into the *same* objects, so whoever refers to one of them (an optimizer to its parameters, a metric to its states) still
does.
:class:`RandomStates` does the same for the global generators; those that the objects own are part of the memento.

Shortfalls: what is neither a tensor, a container nor an object with attributes is not restored (open files, generators
that Python code runs, native objects). Members of containers above :data:`MAX_ITEMS`, and tensors above
:data:`MAX_DATA_BYTES` that belong to a data set, are taken as constant.
"""

from __future__ import annotations

import collections
import copy
import functools
import random
import sys
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

__all__ = ["MAX_DATA_BYTES", "MAX_ITEMS", "Memento", "RandomStates"]

MAX_ITEMS = 10_000
MAX_DATA_BYTES = 1 << 20

_FOREIGN = (
    "lightning", "pytorch_lightning", "lightning_fabric", "lightning_offload", "logging", "threading", "concurrent",
    "multiprocessing", "asyncio", "io", "weakref", "functools", "inspect", "re", "rich", "tensorboard", "wandb",
)  # fmt: skip
_OPENED_PARTS = ("loops", "demos")  # of Lightning: progress is plain data
_OPENED_TORCH = ("nn", "optim", "amp", "cuda", "utils", "ao")
_ATOMS = (
    type(None), bool, int, float, complex, str, bytes, type, types.ModuleType, types.FunctionType, types.MethodType,
    types.BuiltinFunctionType, torch.dtype, torch.device, torch.Size, property,
)  # fmt: skip


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


class Memento:
    """Remembers the state of all objects below some roots.

    Args:
        roots: Where to begin; these are walked whatever they are.
    """

    def __init__(self, roots: Iterable[object]) -> None:
        self._known: dict[int, object] = {}  # holds what it knows: an id is good while its object lives
        self._undo: list[Callable[[], None]] = []
        waiting: collections.deque[tuple[object, bool]] = collections.deque()
        for root in roots:
            self._note_attributes(root, waiting, is_data=isinstance(root, Dataset))
        while waiting:
            found, is_data = waiting.popleft()
            self._note(found, waiting, is_data=is_data or isinstance(found, Dataset))

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back as it was when this memento was made."""
        for undo in self._undo:
            undo()

    def _note(self, found: Any, waiting: collections.deque[tuple[object, bool]], *, is_data: bool) -> None:
        if isinstance(found, _ATOMS) or id(found) in self._known:
            return
        if isinstance(found, Tensor):
            self._known[id(found)] = found
            self._note_tensor(found, waiting, is_data=is_data)
        elif isinstance(found, (list, dict, set, collections.deque)):
            self._known[id(found)] = found
            self._note_container(found, waiting, is_data=is_data)
            if _is_open(found):
                self._note_attributes(found, waiting, is_data=is_data)
        elif isinstance(found, (tuple, frozenset)):
            self._known[id(found)] = found
            if len(found) <= MAX_ITEMS:
                waiting.extend((item, is_data) for item in found)
        elif (undo := _undo_generator(found)) is not None:
            self._known[id(found)] = found
            self._undo.append(undo)
        elif _is_open(found):
            self._note_attributes(found, waiting, is_data=is_data)

    def _note_tensor(self, tensor: Tensor, waiting: collections.deque[tuple[object, bool]], *, is_data: bool) -> None:
        if tensor.is_meta or torch.nn.parameter.is_lazy(tensor):
            return
        if is_data and tensor.nbytes > MAX_DATA_BYTES:
            return
        copied = tensor.detach().to("cpu", copy=True)
        target = tensor.detach()
        self._undo.append(lambda: _copy_back(target, copied))
        if tensor.is_leaf:
            grad = tensor.grad
            waiting.append((grad, is_data))
            self._undo.append(lambda: setattr(tensor, "grad", grad))

    def _note_container(self, found: Any, waiting: collections.deque[tuple[object, bool]], *, is_data: bool) -> None:
        members = copy.copy(dict(found)) if isinstance(found, dict) else list(found)
        self._undo.append(lambda: _refill(found, members))
        if len(members) <= MAX_ITEMS:
            waiting.extend((item, is_data) for item in (members.values() if isinstance(members, dict) else members))

    def _note_attributes(self, found: Any, waiting: collections.deque[tuple[object, bool]], *, is_data: bool) -> None:
        self._known[id(found)] = found
        attributes = getattr(found, "__dict__", None)
        if isinstance(attributes, dict) and id(attributes) not in self._known:
            self._known[id(attributes)] = attributes
            if isinstance(found, torch.nn.Module):
                # hooks are machinery: those of a memory plugin came after this memento and must stay
                self._known.update((id(hooks), hooks) for name, hooks in attributes.items() if "_hooks" in name)
            self._note_container(attributes, waiting, is_data=is_data)
        for name in _slots(type(found)):
            if hasattr(found, name):
                value = getattr(found, name)
                waiting.append((value, is_data))
                self._undo.append(functools.partial(object.__setattr__, found, name, value))


def _is_open(found: object) -> bool:
    """Whether an object's attributes are state that a training step may change, and not machinery."""
    if isinstance(found, (torch.nn.Module, torch.optim.Optimizer)):
        return True
    package, *parts = type(found).__module__.split(".")
    if package == "torch":
        return bool(parts) and parts[0] in _OPENED_TORCH
    if package in _FOREIGN:
        return any(part in _OPENED_PARTS for part in parts)
    return True


def _slots(cls: type) -> list[str]:
    found: list[str] = []
    for base in cls.__mro__:
        if base.__module__.partition(".")[0] in ("builtins", "torch", "typing", "collections"):
            continue
        slots = vars(base).get("__slots__", ())
        found += [slots] if isinstance(slots, str) else list(slots)
    return [name for name in found if not name.startswith("__")]


def _copy_back(target: Tensor, copied: Tensor) -> None:
    if target.untyped_storage().nbytes() < copied.nbytes and target.layout is torch.strided:
        target.untyped_storage().resize_(copied.nbytes)  # a step may have emptied it
    target.copy_(copied)


def _refill(container: Any, members: Any) -> None:
    """Give a container the very members that it had, if it has others now."""
    if isinstance(container, dict):
        same = list(container) == list(members) and all(container[key] is members[key] for key in members)
        if not same:
            container.clear()
            container.update(members)
    elif isinstance(container, list):
        container[:] = members
    else:
        container.clear()
        container.update(members) if isinstance(container, set) else container.extend(members)


def _undo_generator(found: Any) -> Callable[[], None] | None:
    """What puts a generator of random numbers back; None for anything else."""
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
    if isinstance(found, numpy.ndarray) and found.nbytes <= MAX_DATA_BYTES and found.flags.writeable:
        array = found.copy()
        return lambda: found.__setitem__(..., array)
    return None


def _discard(_: object) -> None:
    """A setter's return value is not wanted."""
