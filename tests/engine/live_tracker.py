"""A count of live device bytes that does not trust the runtime.

`LiveStorageTracker` is a dispatch mode that is entered outside everything else. It looks at the arguments
and outputs of each op and follows every storage it sees by a weak reference: torch keeps a storage's Python
object alive while the C++ storage lives, so the reference's callback fires exactly when the memory goes.
Storages that no op has touched yet (parameters, optimizer state, a batch) are added by `register`, or all of
them by `register_all`. A storage that was resized is noticed by the next op that reads it, or, where a program is known
to resize some, before a new peak is noted.
What a kernel allocates and frees within itself is not seen, and neither is memory that is not a tensor (host buffers
of the runtime).
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

_PLAIN = (Tensor, nn.Parameter)
_SCALARS = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout})


class Window:
    """The highest count of live bytes while the window was open."""

    def __init__(self, live_bytes: int) -> None:
        self.peak_bytes = live_bytes
        self.peak_op = "at the start"


class LiveStorageTracker(TorchDispatchMode):
    """Counts the bytes of all live storages of one device type.

    Args:
        device: The device whose storages count.
        has_resizes: Whether the program resizes storages itself, so that sizes are read before each peak.
    """

    def __init__(self, device: torch.device | str = "cpu", *, has_resizes: bool = False) -> None:
        super().__init__()
        self._device_type = torch.device(device).type
        self._live: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._windows: list[Window] = []
        self._has_resizes = has_resizes
        self.live_bytes = 0

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Compiled code stays compiled under the tracker."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """A wrapper that keeps torch.compile out of `__torch_dispatch__` costs as much as the rest of it."""
        return False

    @property
    def num_storages(self) -> int:
        """How many storages are alive."""
        return len(self._live)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run the op, then count what it was given and what it made."""
        result = func(*args, **(kwargs or {}))
        for value in args:
            self._follow(value)
        if kwargs:
            for value in kwargs.values():
                self._follow(value)
        self._follow(result)
        if self._windows:
            self._rise(func)
        return result

    def register(self, *objects: Any) -> None:
        """Count tensors that no op has touched: of tensors, modules, optimizers and containers of them."""
        for item in objects:
            self._follow(_registered(item))
        self._rise("registered")

    def register_all(self) -> None:
        """Count every tensor that Python knows of, with its gradient; not those that `gc.freeze` has set aside."""
        is_tensor: dict[type, bool] = {}
        for item in gc.get_objects():
            kind = type(item)
            if kind not in is_tensor:
                is_tensor[kind] = issubclass(kind, Tensor) and not issubclass(kind, FakeTensor)
            if is_tensor[kind]:
                self._follow_tensor(item)
                if item.is_leaf and item.grad is not None:
                    self._follow_tensor(item.grad)
        self._rise("registered")

    @contextmanager
    def window(self) -> Iterator[Window]:
        """Yield a window whose `peak_bytes` is final when the context ends."""
        opened = Window(self.live_bytes)
        self._windows.append(opened)
        try:
            yield opened
        finally:
            self._windows.remove(opened)

    def _rise(self, op: object) -> None:
        if all(self.live_bytes <= window.peak_bytes for window in self._windows):
            return
        if self._has_resizes:
            self._read_sizes_again()
        for window in self._windows:
            if self.live_bytes > window.peak_bytes:
                window.peak_bytes = self.live_bytes
                window.peak_op = str(op)

    def _follow(self, value: Any) -> None:
        kind = type(value)
        if kind in _SCALARS:
            return
        if kind in _PLAIN or isinstance(value, Tensor):
            self._follow_tensor(value)
        elif isinstance(value, (tuple, list)):
            for item in value:
                self._follow(item)
        elif isinstance(value, dict):
            for item in value.values():
                self._follow(item)

    def _follow_tensor(self, tensor: Tensor) -> None:
        layout = tensor.layout
        if layout is torch.sparse_coo:
            self._follow((tensor._indices(), tensor._values()))
            return
        if type(tensor) not in _PLAIN and is_traceable_wrapper_subclass(tensor):
            names, _ = tensor.__tensor_flatten__()
            self._follow([getattr(tensor, name) for name in names])
            return
        if layout is not torch.strided or tensor.device.type != self._device_type:
            return
        storage = tensor.untyped_storage()
        key, num_bytes = storage._cdata, storage.nbytes()
        known = self._live.get(key)
        if known is not None:
            if known[1] != num_bytes:
                self._resized(key, num_bytes)
        elif storage.resizable():  # else a view of memory that torch did not allocate: the runtime's host buffers
            self._live[key] = (weakref.ref(storage, self._death_of(key)), num_bytes)
            self.live_bytes += num_bytes

    def _read_sizes_again(self) -> None:
        for key, (reference, known_bytes) in list(self._live.items()):
            storage = reference()
            if storage is not None and (num_bytes := storage.nbytes()) != known_bytes:
                self._resized(key, num_bytes)

    def _resized(self, key: int, num_bytes: int) -> None:
        reference, known_bytes = self._live[key]
        self._live[key] = (reference, num_bytes)
        self.live_bytes += num_bytes - known_bytes

    def _death_of(self, key: int) -> Any:
        tracker = weakref.ref(self)

        def on_death(_: Any) -> None:
            owner = tracker()
            if owner is not None:
                owner.live_bytes -= owner._live.pop(key)[1]

        return on_death


def _registered(item: Any) -> Any:
    if isinstance(item, nn.Module):
        weights = list(item.parameters())
        return [weights, [w.grad for w in weights], list(item.buffers())]
    if isinstance(item, Optimizer):
        return [list(state.values()) for state in item.state.values()]
    return item
