"""Counts the bytes of live tensors without asking the library that is being measured.

Protocol: `with LiveStorageTracker(device) as tracker: tracker.add(persistent tensors); <a step>` and then
`tracker.peak_bytes`. Inside the scope every dispatched op shows its arguments and results to the tracker,
which remembers each storage once and learns of its end by a weak reference: PyTorch keeps one Python object
per storage for as long as the storage lives, so the reference dies exactly when the memory is returned.
Storages may die on any thread and inside garbage collection; the callback therefore only appends to a deque,
and the thread that dispatches ops does the sums.

Known shortfalls: scratch memory inside one kernel and tensors that no op in the scope ever touches are not
seen; `resize_` on a storage is noticed at the next op that touches it, or when a new peak is about to be
noted.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class _Entry(weakref.ref[torch.UntypedStorage]):
    """A weak reference to a storage that knows its address in the books and the bytes booked."""

    __slots__ = ("key", "num_bytes")

    def __new__(cls, storage: torch.UntypedStorage, callback: Callable[[Any], None]) -> _Entry:
        """Refer to `storage`, with nothing booked yet."""
        self = super().__new__(cls, storage, callback)
        self.key = id(storage)
        self.num_bytes = 0
        return self

    key: int
    num_bytes: int


class LiveStorageTracker(TorchDispatchMode):
    """Sums the sizes of all storages alive on one device and keeps the maximum.

    Args:
        device: Storages on other device types are ignored.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device
        self.live_bytes = 0
        self.peak_bytes = 0
        self._entries: dict[int, _Entry] = {}
        self._dead: deque[_Entry] = deque()

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Tell `torch.compile` that compiled modules may stay compiled under this mode."""
        return True

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run the op and note every storage that it reads or returns."""
        kwargs = kwargs or {}
        self.add(_tensors((args, kwargs)))
        result = func(*args, **kwargs)
        self.add(_tensors(result))
        return result

    def add(self, tensors: Iterable[Tensor]) -> None:
        """Count the storages of `tensors`; those already counted are not counted again."""
        self._bury()
        for tensor in tensors:
            if tensor.device.type == self.device.type and tensor.layout is torch.strided:
                self._note(tensor.untyped_storage())
        if self.live_bytes > self.peak_bytes:
            self._refresh()
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _note(self, storage: torch.UntypedStorage) -> None:
        """Enter one storage, or update its size."""
        entry = self._entries.get(id(storage))
        if entry is None or entry() is not storage:
            entry = _Entry(storage, self._dead.append)
            self._entries[entry.key] = entry
        num_bytes = storage.nbytes()
        self.live_bytes += num_bytes - entry.num_bytes
        entry.num_bytes = num_bytes

    def _bury(self) -> None:
        """Take the storages off the books that ended since the last op."""
        while self._dead:
            entry = self._dead.popleft()
            self.live_bytes -= entry.num_bytes
            if self._entries.get(entry.key) is entry:
                del self._entries[entry.key]

    def _refresh(self) -> None:
        """Read all sizes again, for storages that were resized in place since they were noted."""
        for entry in list(self._entries.values()):
            storage = entry()
            if storage is not None:
                self._note(storage)


def _tensors(tree: Any) -> Iterator[Tensor]:
    """Yield every tensor in nested lists, tuples and mappings."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, list | tuple):
        for item in tree:
            yield from _tensors(item)
    elif isinstance(tree, Mapping):
        yield from _tensors(list(tree.values()))


_cuda: Any = torch.cuda  # one of whose functions is replaced for a while


class CudaPeak:
    """The same protocol on a CUDA device, where the allocator itself keeps the peak (workspaces included).

    The allocator knows one peak at a time, and the library resets it where it measures a step. So each reset within
    the scope notes the peak before it.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.peak_bytes = 0
        self.reserved_bytes = 0
        self._reset: Callable[[Any], None] = _cuda.reset_peak_memory_stats

    def add(self, tensors: Iterable[Tensor]) -> None:
        """Do nothing: the allocator knows its tensors."""

    def __enter__(self) -> CudaPeak:
        self._reset = _cuda.reset_peak_memory_stats
        self._reset(self.device)
        _cuda.reset_peak_memory_stats = self._note_and_reset
        return self

    def __exit__(self, *exc_info: object) -> None:
        _cuda.reset_peak_memory_stats = self._reset
        self._note()

    def _note(self) -> None:
        self.peak_bytes = max(self.peak_bytes, _cuda.max_memory_allocated(self.device))
        self.reserved_bytes = max(self.reserved_bytes, _cuda.max_memory_reserved(self.device))

    def _note_and_reset(self, device: Any = None) -> None:
        self._note()
        self._reset(device)


def peak_tracker(device: torch.device) -> LiveStorageTracker | CudaPeak:
    """Return what measures the peak on `device`."""
    return CudaPeak(device) if device.type == "cuda" else LiveStorageTracker(device)
