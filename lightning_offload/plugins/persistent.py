"""Persistent state on the device that no op of a step need touch: optimizer state, unused parameters, buckets.

Learnt from the module, where one is given, and from the optimizers themselves through torch's global
optimizer-step hooks. Tensors are known by weak reference; nothing is kept alive.

Note [whose gradients are read]: torch ends the process (a segmentation fault) where one thread asks a parameter for its
``.grad`` while another thread's backward makes it. So gradients are read only of what this plugin's steps train and of
what is trained in their thread; an optimizer of another thread is another training, whose tensors are counted as far
as they can be seen without asking them anything. Which thread is theirs shows when the first step begins: until then an
optimizer's gradients are read in the thread alone that it stepped in.
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lightning_offload.capture.live import LiveStorages, live_storages
from lightning_offload.plugins.buffer_copies import BufferCopies
from lightning_offload.plugins.data_parallel import DataParallelModels, GradientBuckets
from lightning_offload.tensors.op_facts import is_plain, parts_of, tensors_in


@dataclasses.dataclass(slots=True)
class _Known:
    """What is known of an optimizer.

    Attributes:
        thread: Where it stepped before the first step, whose thread is not known yet; None for one that is ours.
        num_tensors: Tensors of its state; -1 before they were counted.
    """

    thread: int | None
    num_tensors: int = -1


class PersistentState:
    """Parameters, buffers and their copies, gradients, optimizer state and DDP's buckets, each storage counted once.

    Attributes:
        copies: Memory for copies of the buffers.
        data_parallel: The DDP models that the steps have to do with, and their gradient buckets; none without DDP.
        optimizer_state_bytes: Bytes of the optimizers' state, None before the first optimizer step.
        optimizer_peak_bytes: Parameters, buffers, gradients and optimizer state after the last optimizer step that
            made state, without the step's temporaries; None before the first.
        thread: The thread that the steps run in; None before the first.
    """

    def __init__(
        self,
        before_optimizer_step: Callable[[list[Tensor]], None],
        after_optimizer_step: Callable[[], None] = lambda: None,
    ) -> None:
        self.copies = BufferCopies()
        self.data_parallel = DataParallelModels()
        self.optimizer_state_bytes: int | None = None
        self.optimizer_peak_bytes: int | None = None
        self.thread: int | None = None
        self._version = 0
        self._before_optimizer_step = before_optimizer_step
        self._after_optimizer_step = after_optimizer_step
        self._module: weakref.ref[torch.nn.Module] | None = None
        self._optimizers: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Known] = weakref.WeakKeyDictionary()
        self._leaves: dict[int, weakref.ref[Tensor]] = {}
        self._lock = threading.Lock()
        self._hooks: list[Any] = []

    @property
    def buckets(self) -> GradientBuckets:
        """The gradient buckets of DDP."""
        return self.data_parallel.buckets

    @property
    def version(self) -> int:
        """Grows whenever there is state that was not there before."""
        return self._version + self.buckets.version + self.copies.version

    def attach(self, module: torch.nn.Module | None) -> None:
        """Install the optimizer hooks."""
        self._module = weakref.ref(module) if module is not None else None
        if not self._hooks:
            self._hooks = [
                register_optimizer_step_pre_hook(self._before),
                register_optimizer_step_post_hook(self._after),
            ]

    def detach(self) -> None:
        """Take the hooks off, and keep no memory."""
        self.copies.clear()
        while self._hooks:
            self._hooks.pop().remove()

    def learn_leaves(self, leaves: dict[int, weakref.ref[Tensor]]) -> None:
        """Know the trainable tensors that a recorded step read, as far as the module does not."""
        module = self._module() if self._module is not None else None
        known = {id(parameter) for parameter in _parameters(module)} if module is not None else frozenset[int]()
        for key, reference in leaves.items():
            leaf = reference()
            if leaf is not None and id(leaf) not in known:
                self._leaves[key] = reference

    def _before(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not self._is_of_another_training(optimizer):
            self._know(optimizer)  # now, since one with a closure has steps of ours inside
        self._before_optimizer_step([p for group in optimizer.param_groups for p in group["params"]])

    def _after(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._is_of_another_training(optimizer):
            return
        known, num_tensors = self._know(optimizer), sum(1 for _ in tensors_in(list(optimizer.state.values())))
        may_read = self.thread is not None or not self._trained_by_steps() or self._trains_ours(optimizer)
        if may_read and known.num_tensors != num_tensors:
            known.num_tensors = num_tensors
            self._version += 1
            self.optimizer_state_bytes = sum(_sizes(tensors_in(self.optimizer_states())).values())
            all_state = {**_sizes(self.tensors()), **self.gradients(), **self.buckets.sizes()}
            self.optimizer_peak_bytes = sum(all_state.values())
        self._after_optimizer_step()

    def _know(self, optimizer: torch.optim.Optimizer) -> _Known:
        thread = threading.get_ident() if self.thread is None else None
        with self._lock:  # it may step in another thread than ours
            known = self._optimizers.setdefault(optimizer, _Known(thread))
        known.thread = thread
        return known

    def _is_of_another_training(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether an optimizer that stepped has nothing to do with our steps: Note [whose gradients are read]."""
        if self.thread is None or self.thread == threading.get_ident():
            return False
        return not self._trains_ours(optimizer)

    def _trains_ours(self, optimizer: torch.optim.Optimizer) -> bool:
        ours = {id(tensor) for tensor in self._trained_by_steps()}
        return any(id(p) in ours for group in optimizer.param_groups for p in group["params"])

    def _all_optimizers(self) -> list[torch.optim.Optimizer]:
        thread = threading.get_ident() if self.thread is None else self.thread
        with self._lock:
            return [optimizer for optimizer, known in self._optimizers.items() if known.thread in (None, thread)]

    def trainable(self) -> list[Tensor]:
        """Tensors that collect gradients, as far as they are known, some of them twice."""
        found = self._trained_by_steps()
        for optimizer in self._all_optimizers():
            for group in optimizer.param_groups:
                found += group["params"]
        return found

    def _trained_by_steps(self) -> list[Tensor]:
        module = self._module() if self._module is not None else None
        trained = _parameters(module) if module is not None else []
        trained += [leaf for leaf in (reference() for reference in self._leaves.values()) if leaf is not None]
        return trained

    def _gradients(self) -> list[Tensor]:
        return [gradient for gradient in [p.grad for p in self.trainable()] if gradient is not None]

    def gradients(self) -> dict[int, int]:
        """The gradients that are there now, those that are views of buckets aside: bytes by identity of the storage."""
        buckets = self.buckets.sizes()
        sizes = _sizes(self._gradients())
        return {key: size for key, size in sizes.items() if key not in buckets}

    def gradient_versions(self) -> dict[int, tuple[int, int]]:
        """All that are there now: bytes, and how often each was written, which counts on where backward adds to it."""
        found: dict[int, tuple[int, int]] = {}
        for gradient in _plain_parts(self._gradients()):
            storage = gradient.untyped_storage()
            version = 0 if gradient.is_inference() else gradient._version
            found[storage._cdata] = storage.nbytes(), version + found.get(storage._cdata, (0, 0))[1]
        return found

    def storages(self, device: torch.device) -> LiveStorages:
        """All storages on a device: those of every tensor that Python knows of, and those known here."""
        return {**live_storages(device), **self.known_storages(device)}

    def known_storages(self, device: torch.device) -> LiveStorages:
        """Those of what belongs to the training, on a device."""
        known = _plain_parts(itertools.chain(self.tensors(), self._gradients()))
        storages = (tensor.untyped_storage() for tensor in known if tensor.device == device)
        return {**{s._cdata: s for s in storages}, **self.buckets.storages(device)}

    def identities(self) -> set[int]:
        """Of the storages of :meth:`tensors`."""
        return set(_sizes(self.tensors()))

    @property
    def growth_bytes(self) -> int:
        """By how much the optimizers' state is yet to grow: L-BFGS keeps two vectors for each of its iterations."""
        total = 0
        for optimizer in self._all_optimizers():
            for group in optimizer.param_groups if isinstance(optimizer, torch.optim.LBFGS) else ():
                num_bytes = sum(parameter.nbytes for parameter in group["params"])
                known = [len(state.get("old_dirs") or ()) for state in optimizer.state.values()]
                total += 2 * num_bytes * max(0, group["history_size"] - max(known, default=0))
        return total

    def optimizer_states(self) -> list[Any]:
        """What the optimizers know of each of their parameters."""
        return [state for optimizer in self._all_optimizers() for state in list(optimizer.state.values())]

    def tensors(self) -> Iterator[Tensor]:
        """Parameters, buffers and their copies, and optimizer state, some of them twice."""
        yield from self.trainable()
        module = self._module() if self._module is not None else None
        if module is not None:
            yield from module.buffers()
        yield from self.copies
        yield from tensors_in(self.optimizer_states())


def _parameters(module: torch.nn.Module) -> list[Tensor]:
    """What ``module.parameters()`` gives, some of them twice, in a tenth of its time: every step asks."""
    found: list[Tensor | None] = []
    seen, modules = {id(module)}, [module]
    for parent in modules:  # which grows meanwhile
        own: dict[str, Tensor | None] | None = parent.__dict__.get("_parameters")
        if own is None:  # compiled to TorchScript, which has them elsewhere
            found += parent.parameters()
            continue
        found += own.values()
        for child in parent._modules.values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                modules.append(child)
    return [parameter for parameter in found if parameter is not None]


def _sizes(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Bytes by identity of the storage."""
    storages = (tensor.untyped_storage() for tensor in _plain_parts(tensors))
    return {storage._cdata: storage.nbytes() for storage in storages}


def _plain_parts(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """What has memory of its own: of a DTensor this rank's shard."""
    for tensor in tensors:
        if is_plain(tensor):
            yield tensor
        else:
            yield from (part for part in parts_of(tensor) if part is not tensor and is_plain(part))
