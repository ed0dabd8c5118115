"""Puts everything back that training steps change: tensors, plain Python state, and random states.

:class:`RandomStates` are those of the global generators; generators that objects own are among their members.

:class:`StateSnapshot` walks the objects below some roots (a model, its data, a framework's loops) and remembers what
is in them: tensors by a copy in host memory, lists, dicts and attributes by their members. `restore` writes the
contents back into the *same* objects, so whoever refers to one of them (an optimizer to its parameters, a metric to
its states) still does. Gradients are not held on to, so a snapshot takes no device memory.

:func:`take_snapshot` is the same for objects that someone uses, of which only some are training state.

Shortfalls: what is neither a tensor, a container nor an object with attributes is not restored (open files,
generators that Python code runs, native objects). Members of containers above :data:`MAX_ITEMS`, and tensors and
arrays above :data:`MAX_DATA_BYTES` that belong to a data set, and mapped files, are taken as constant.
"""

from __future__ import annotations

import collections
import copy
import functools
import random
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_offload.accelerators import generators_in_use
from lightning_offload.plugins.memory import MemoryPlugin
from lightning_offload.tensors.op_facts import is_leaf, is_plain, parts_of


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomStates:
    """States of the global generators of Python, NumPy and torch, of the CPU first and then of each accelerator."""

    python: Any
    numpy: Any
    torch_devices: tuple[Tensor, ...]

    @classmethod
    def now(cls) -> RandomStates:
        """Record the states as they are."""
        numpy: Any = sys.modules.get("numpy")
        return cls(
            python=random.getstate(),
            numpy=numpy.random.get_state() if numpy is not None else None,
            torch_devices=tuple(generator.get_state() for generator in generators_in_use()),
        )

    def restore(self) -> None:
        """Put the states back."""
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)
        for generator, state in zip(generators_in_use(), self.torch_devices, strict=False):  # more may be in use now
            generator.set_state(state)


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


Restore = Callable[[], None]
"""Puts something back as it was; may be called more than once."""

MAX_ITEMS = 10_000  # of a container that is copied; larger ones are data
MAX_DATA_BYTES = 1 << 20  # of an array that is copied; larger ones are data

_FOREIGN = (
    "lightning", "pytorch_lightning", "lightning_fabric", "lightning_offload", "accelerate", "logging", "threading",
    "concurrent", "multiprocessing", "asyncio", "io", "weakref", "functools", "inspect", "re", "rich", "tensorboard",
    "wandb",
)  # fmt: skip
_OPENED_PARTS = ("loops", "demos", "combined_loader")  # of Lightning: progress is plain data
_MACHINERY = ("lightning_offload", "lightning", "pytorch_lightning", "torch")
"""Packages whose hooks stay where hooks are kept."""
_OPENED_TORCH = ("nn", "optim", "amp", "cuda", "utils", "ao")
_ATOMS = (
    type(None), bool, int, float, complex, str, bytes, type, types.ModuleType, types.FunctionType, types.MethodType,
    types.BuiltinFunctionType, torch.dtype, torch.device, torch.Size, property,
)  # fmt: skip


class StateSnapshot:
    """Remembers the state of all objects below some roots, and that of the global generators.

    Args:
        roots: Where to begin; these are walked whatever they are.
        keeps_hooks: Whether hooks that come later stay where they are no program's, as those of a memory plugin.
        since: An earlier snapshot, which is put back first and whose random states count: tensors that it knows are not
            copied once more.
    """

    def __init__(
        self, roots: Iterable[object], *, keeps_hooks: bool = False, since: StateSnapshot | None = None
    ) -> None:
        self.roots = tuple(roots)
        self.random_states: RandomStates = RandomStates.now() if since is None else since.random_states
        self._keeps_hooks, self._since = keeps_hooks, since
        self._known: dict[int, object] = {}  # holds what it knows: an id is good while its object lives
        self._undo: list[Callable[[], None]] = []
        waiting: collections.deque[tuple[object, bool]] = collections.deque()
        for root in self.roots:
            if (undo := undo_generator(root)) is not None:
                self._undo.append(undo)
            else:
                self._note_attributes(root, waiting, is_data=_holds_data(root))
        while waiting:
            found, is_data = waiting.popleft()
            self._note(found, waiting, is_data=is_data or isinstance(found, Dataset))

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back as it was when this snapshot was made."""
        if self._since is not None:
            self._since.restore()
        for undo in self._undo:
            undo()
        self.random_states.restore()

    def _note(self, found: Any, waiting: collections.deque[tuple[object, bool]], *, is_data: bool) -> None:
        waiting.extend((each, is_data) for each in self._behind(found))
        if isinstance(found, _ATOMS) or id(found) in self._known:
            return
        if isinstance(found, Tensor):
            self._known[id(found)] = found
            self._note_tensor(found, is_data=is_data)
        elif isinstance(found, (list, dict, set, collections.deque)):
            self._known[id(found)] = found
            self._note_container(found, waiting, is_data=is_data)
            if _is_open(found):
                self._note_attributes(found, waiting, is_data=is_data)
        elif isinstance(found, (tuple, frozenset)):
            self._known[id(found)] = found
            if len(found) <= MAX_ITEMS:
                waiting.extend((item, is_data) for item in found)
        elif (undo := undo_generator(found) or _undo_array(found, is_data=is_data)) is not None:
            self._known[id(found)] = found
            self._undo.append(undo)
        elif _is_open(found):
            self._note_attributes(found, waiting, is_data=is_data)

    def _behind(self, found: Any) -> Iterable[Any]:
        """What a function goes by: the object that a method is of, what a partial gives, what a closure holds."""
        if isinstance(found, functools.partial):
            return [found.func, *found.args, *found.keywords.values()]
        if isinstance(found, (types.MethodType, types.BuiltinFunctionType)):
            return [found.__self__]
        if not isinstance(found, types.FunctionType) or not found.__closure__ or id(found) in self._known:
            return []
        if found.__module__ is None or found.__module__.partition(".")[0] in (*_FOREIGN, "torch"):
            return []
        self._known[id(found)] = found
        cells = [cell for cell in found.__closure__ if _is_set(cell)]
        self._undo.extend(functools.partial(setattr, cell, "cell_contents", cell.cell_contents) for cell in cells)
        return [cell.cell_contents for cell in cells]

    def _note_tensor(self, tensor: Tensor, *, is_data: bool) -> None:
        if tensor.is_meta or torch.nn.parameter.is_lazy(tensor):
            return
        if is_data and tensor.nbytes > MAX_DATA_BYTES:
            return
        if self._since is not None and id(tensor) in self._since._known:
            return
        self._undo.extend(_undo_tensor(part) for part in parts_of(tensor))
        if is_leaf(tensor):
            self._undo.append(_undo_gradient(tensor))
            self._undo.append(_undo_requires_grad(tensor))
            self._undo.extend(_undo_tensor_hooks(tensor, name) for name in _TENSOR_HOOKS)

    def _note_container(self, found: Any, waiting: collections.deque[tuple[object, bool]], *, is_data: bool) -> None:
        members = copy.copy(dict(found)) if isinstance(found, dict) else list(found)
        self._undo.append(lambda: _refill(found, members))
        if len(members) <= MAX_ITEMS:
            waiting.extend((item, is_data) for item in (members.values() if isinstance(members, dict) else members))

    def _note_module(
        self, module: torch.nn.Module, waiting: collections.deque[tuple[object, bool]], *, is_data: bool
    ) -> None:
        """What the attributes of a module do not tell: its class, tensors of a script, and whose its hooks are."""
        self._undo.append(functools.partial(_set_class, module, type(module)))
        if isinstance(module, torch.jit.ScriptModule):
            waiting.extend((tensor, is_data) for tensor in (*module.parameters(), *module.buffers()))
        if self._keeps_hooks:
            for name, hooks in vars(module).items():
                if "_hooks" in name and isinstance(hooks, dict):
                    self._known[id(hooks)] = hooks
                    self._undo.append(functools.partial(_refill_hooks, hooks, dict(hooks)))

    def _note_attributes(self, found: Any, waiting: collections.deque[tuple[object, bool]], *, is_data: bool) -> None:
        self._known[id(found)] = found
        attributes = getattr(found, "__dict__", None)
        if isinstance(attributes, dict) and id(attributes) not in self._known:
            self._known[id(attributes)] = attributes
            if isinstance(found, torch.nn.Module):
                self._note_module(found, waiting, is_data=is_data)
            self._note_container(attributes, waiting, is_data=is_data)
        for name in _slots(type(found)):
            if hasattr(found, name):
                value = getattr(found, name)
                waiting.append((value, is_data))
                self._undo.append(functools.partial(object.__setattr__, found, name, value))


def _holds_data(root: object) -> bool:
    """Whether large arrays and tensors below it are data, which no step changes."""
    return isinstance(root, Dataset) or any(cls.__name__ == "LightningDataModule" for cls in type(root).__mro__)


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


def _on_host(tensor: Tensor) -> Tensor:
    """A copy in host memory; where the host is the device, too, in memory that does not count as the device's."""
    if not is_plain(tensor) or tensor.device.type != "cpu" or not tensor.nbytes or tensor.is_conj() or tensor.is_neg():
        return tensor.to("cpu", copy=True)
    like = torch.empty_like(tensor, device="meta")  # its strides, without gaps
    memory = torch.frombuffer(bytearray(tensor.nbytes), dtype=torch.uint8).view(tensor.dtype)
    return memory.as_strided(like.size(), like.stride()).copy_(tensor)


def _undo_tensor(tensor: Tensor) -> Restore:
    copied = _on_host(tensor.detach())
    is_strided = tensor.layout is torch.strided
    is_plain_memory = is_strided and is_plain(tensor) and not tensor.is_quantized
    num_bytes = tensor.untyped_storage().nbytes() if is_strided else 0
    target = tensor.detach() if is_strided else tensor  # the same memory, which others have none of their own

    def undo() -> None:
        if is_strided and target.untyped_storage().nbytes() < num_bytes:
            target.untyped_storage().resize_(num_bytes)  # a step may have emptied it
        if not _has_same_bytes(target, copied):  # it may be that it cannot be written
            target.copy_(copied)
        if is_plain_memory and (tensor.device != target.device or not tensor.is_set_to(target)):
            tensor.data = target  # it was moved to another device, or given other memory

    return undo


def _has_same_bytes(tensor: Tensor, copied: Tensor) -> bool:
    """Whether a tensor in host memory is as its copy; of others that is not looked for."""
    if tensor.device != copied.device or tensor.layout is not torch.strided or not is_plain(tensor):
        return False
    if tensor.is_quantized or tensor.is_conj() or tensor.is_neg() or tensor.shape != copied.shape:
        return False
    one, other = (each.contiguous().reshape(-1).view(torch.uint8) for each in (tensor, copied))
    return torch.equal(one, other)


_TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def _undo_tensor_hooks(tensor: Tensor, name: str) -> Restore:
    before = dict(getattr(tensor, name, None) or {})

    def undo() -> None:
        hooks = getattr(tensor, name, None)
        if hooks:
            _refill_hooks(hooks, before)

    return undo


def _refill_hooks(hooks: Any, before: Mapping[Any, Any]) -> None:
    """Leave the hooks that there were, and those that are no program's."""
    kept = {**before, **{key: hook for key, hook in hooks.items() if key not in before and _is_machinery(hook)}}
    if list(hooks) != list(kept):
        hooks.clear()
        hooks.update(kept)


def _is_machinery(hook: Any) -> bool:
    while isinstance(hook, functools.partial):
        hook = hook.func
    owner = getattr(hook, "__self__", None)
    module = getattr(hook, "__module__", None) if owner is None else type(owner).__module__
    return isinstance(hook, bool) or (module or type(hook).__module__).partition(".")[0] in _MACHINERY


def _set_class(module: torch.nn.Module, cls: type) -> None:
    if type(module) is not cls:
        module.__class__ = cls


def _is_set(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _undo_gradient(tensor: Tensor) -> Restore:
    if tensor.grad is None:
        return lambda: setattr(tensor, "grad", None)
    copied, device = _on_host(tensor.grad.detach()), tensor.grad.device
    still_there = weakref.ref(tensor.grad)

    def undo() -> None:
        gradient = still_there()
        if gradient is None or (gradient.device, gradient.dtype) != (device, copied.dtype):
            gradient = copied.to(device, copy=True)
        else:
            gradient.detach().copy_(copied)
        tensor.grad = gradient

    return undo


def _undo_requires_grad(tensor: Tensor) -> Restore:
    is_required = tensor.requires_grad  # a step may freeze a layer

    def undo() -> None:
        if tensor.requires_grad != is_required:
            tensor.requires_grad_(is_required)

    return undo


def _undo_array(found: Any, *, is_data: bool) -> Restore | None:
    numpy: Any = sys.modules.get("numpy")
    if numpy is None or not isinstance(found, numpy.ndarray) or not found.flags.writeable:
        return None
    if isinstance(found, numpy.memmap) or (is_data and found.nbytes > MAX_DATA_BYTES):
        return None
    array = found.copy()
    return lambda: found.__setitem__(..., array)


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


def take_snapshot(objects: Iterable[Any]) -> Restore:
    """Remember what is training state among objects, and the random state.

    Training state is what has ``state_dict`` and ``load_state_dict`` (models, optimizers, schedulers, gradient scalers,
    averaged weights), and generators of random numbers, of dataloaders too; as well where a list, tuple or dict holds
    it, or an object that is no library's machinery. Memory plugins keep their plans.

    Returns:
        What puts all of it back.
    """
    found = _collect(objects)
    snapshot = StateSnapshot(found)
    natives = [(each, copy.deepcopy(each.state_dict())) for each in found if _is_native(each)]

    def restore() -> None:
        snapshot.restore()
        for each, state in natives:
            each.load_state_dict(copy.deepcopy(state))

    return restore


def _collect(objects: Iterable[Any]) -> list[Any]:
    """The training state among objects, each once."""
    waiting, known, found = collections.deque(objects), dict[int, Any](), list[Any]()
    while waiting:
        each = waiting.popleft()
        if isinstance(each, _ATOMS) or id(each) in known:
            continue
        known[id(each)] = each
        if _is_training_state(each):
            found.append(each)
        elif isinstance(each, DataLoader):
            waiting.extend(getattr(holder, "generator", None) for holder in (each, each.sampler, each.batch_sampler))
        else:
            waiting.extend(_members(each))
    return found


def _members(each: Any) -> Iterable[Any]:
    """What is inside a container, or an object that holds things."""
    if isinstance(each, (list, tuple, Mapping)):
        members = each.values() if isinstance(each, Mapping) else each
        return members if len(each) <= MAX_ITEMS else ()
    if isinstance(each, (Tensor, Dataset)) or not _is_open(each):
        return ()
    attributes = getattr(each, "__dict__", None)
    slots = [getattr(each, name, None) for name in _slots(type(each))]
    return [*attributes.values(), *slots] if isinstance(attributes, dict) else slots


def _is_training_state(each: Any) -> bool:
    if isinstance(each, (type, MemoryPlugin)):
        return False
    has_state = hasattr(type(each), "state_dict") and hasattr(type(each), "load_state_dict")
    return has_state or isinstance(each, torch.Generator)


def _is_native(each: Any) -> bool:
    """Whether there is nothing to walk: state that only the object itself can tell."""
    return not (isinstance(each, torch.Generator) or hasattr(each, "__dict__") or _slots(type(each)))
