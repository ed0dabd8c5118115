"""What the runtime knows of one step's tensors: values, the calls that made them, and autograd's handles on them.

Ownership is plain reference counting. Autograd owns a :class:`Handle` for each saved tensor; a handle owns the
:class:`LiveValue` it reads; a value owns what it can be had from: device memory, a host block, or a :class:`Call`
to replay, which owns the values that the call read. When autograd drops a handle, everything that only it
needed goes with it. Nothing here refers to a tensor that has a ``grad_fn`` when it is saved: that would be a
cycle through autograd's graph that no garbage collector sees. One that gets a graph later is such a cycle in plain
PyTorch as well, which holds what it saves itself.

Which value a live storage holds is in a :class:`ValueTable`: identity by the storage object itself, never by its
address. torch keeps the Python object of a storage for as long as the storage lives, so a weak reference to it is an
identity, and its callback the moment of its death. A value that owns no memory is held by the table while its storage
lives; one that owns memory is only referred to weakly, and lives by who needs it.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from lightning_offload.runtime.collector import Allowance
from lightning_offload.runtime.environment import Environment
from lightning_offload.runtime.hooks import dynamo_disabled
from lightning_offload.runtime.lanes import Block, Copy, CopyLanes
from lightning_offload.tensors.geometry import Geometry, plain_set_version
from lightning_offload.tensors.observer import StepObserver
from lightning_offload.tensors.op_facts import OpFacts, detached


class LiveValue:
    """The contents of a storage between two writes, and where they can be had from.

    Attributes:
        index: The storage's index in the step graph, -1 outside a plan.
        num_bytes: Size of the storage.
        stream: The compute stream that ``storage`` was allocated on, where the device has streams and we allocated it.
        origin: The storage it was made on, while that lives and still holds it.
        storage: Device memory that holds it and that this value owns.
        copy: A copy from or to ``storage`` under way.
        block: A block of a lower tier that holds it.
        call: The call that makes it again.
        original: In a verify step: a block with the original of a value that will be replayed.
        readers: Calls that read it, kept for values that only ``origin`` may provide.
        handles: Autograd's handles on it.
        is_external: Whether it existed before the step.
        fresh_version: Of what a recorded call made on memory of its own, as it made it; -1 for any other. A version
            counter of that memory that is elsewhere tells of a write that another thread has made.
        is_ours: Whether the runtime itself allocated ``storage``, for a copy back or in a replay.
        is_handed_out: Whether autograd was given its memory to read, and so perhaps a program that may write it.
        guards: Tensors that share a version counter of its memory, each with the version at which that held the
            value: how a write is noticed that the dispatch mode did not see.
        wrapper: The tensor that an op made it as, while that lives.
    """

    __slots__ = (
        "__weakref__", "block", "call", "copy", "fresh_version", "guards", "handles", "index", "is_external",
        "is_handed_out", "is_ours", "num_bytes", "origin", "original", "readers", "storage", "stream", "wrapper",
    )  # fmt: skip

    def __init__(self, index: int, num_bytes: int) -> None:
        self.index = index
        self.num_bytes = num_bytes
        self.origin: weakref.ref[torch.UntypedStorage] | None = None
        self.storage: torch.UntypedStorage | None = None
        self.stream: Any = None
        self.copy: Copy | None = None
        self.block: Block | None = None
        self.call: Call | None = None
        self.original: Block | None = None
        self.readers: Sequence[weakref.ref[Call]] = ()
        self.handles: Sequence[weakref.ref[Handle]] = ()
        self.is_external = False
        self.fresh_version = -1
        self.is_ours = False
        self.is_handed_out = False
        self.guards: tuple[tuple[Tensor, int], ...] = ()
        self.wrapper: weakref.ref[Tensor] | None = None

    def live(self) -> torch.UntypedStorage | None:
        """Device memory that holds the value now, without doing anything for it; a copy in may be under way."""
        if self.storage is not None:
            return self.storage
        return self.origin() if self.origin is not None else None

    @property
    def has_origin(self) -> bool:
        """Whether the storage that it was made on still holds it, as far as was seen."""
        return self.origin is not None

    @property
    def has_handle(self) -> bool:
        """Whether autograd will read it itself, not only a replay."""
        for handle in self.handles:  # noqa: SIM110  (asked for each value that is replayed)
            if handle() is not None:
                return True
        return False

    @property
    def is_stale(self) -> bool:
        """Whether the memory it was made on was written since, out of our sight."""
        return bool(self.guards) and any(version_alias._version != version for version_alias, version in self.guards)

    def holds_no_longer(self, tensor: Tensor) -> bool:
        """Whether its memory was written since, out of our sight, by what a tensor on it tells as well."""
        if self.fresh_version < 0 or tensor.is_inference():
            return self.is_stale
        # A part may have a counter of its own, which begins at 0.
        return self.is_stale or tensor._version not in (0, self.fresh_version)

    def is_as_saved(self, handle: Handle) -> bool:
        """Whether nothing was written between the copy that a version was noted at and a save of the same storage.

        Parts of a storage may have counters of their own (``unsafe_chunk``, as cells of LSTMs and GRUs do), and may be
        written after others were saved. One that is still at its first version was not.
        """
        return not self.is_stale and all(
            version == handle.version and (version == 0 or share_counter(version_alias, handle.version_alias))
            for version_alias, version in self.guards
        )

    def keep_watch(self) -> None:
        """From now on writes may go unseen: be able to notice them, or do not rely on memory that may be written."""
        if self.guards or self.live() is None:
            return
        tensor = self.wrapper() if self.wrapper is not None else None
        handle = next((found for found in (handle() for handle in self.handles) if found is not None), None)
        if tensor is not None and not tensor.is_inference():  # which has no counter
            version = tensor._version if self.fresh_version < 0 else self.fresh_version
            self.guards = ((version_alias_of(tensor), version),)
        elif handle is not None:
            self.guards = ((handle.version_alias, handle.version),)
        elif self.block is not None or self.call is not None:
            self.leave_origin()

    def guard(self, version_alias: Tensor, version: int) -> None:
        """Be able to notice a write through one more version counter of its memory."""
        if all(known is not version_alias for known, _ in self.guards):
            self.guards = (*self.guards, (version_alias, version))

    def wanted_of_readers(self) -> list[LiveValue]:
        """What the calls that read it made, as far as those would have to make it again."""
        readers = [call for call in (reader() for reader in self.readers) if call is not None]
        results = [(call, reference()) for call in readers for reference in call.results.values()]
        return [value for call, value in results if value is not None and value.call is call]

    def hand_over(self, storage: torch.UntypedStorage) -> list[int]:
        """Have what saved it follow its storage from now on, whatever that will hold; the ordinals of those packs."""
        found = []
        for handle in (reference() for reference in self.handles):
            if handle is not None and handle.geometry is not None and handle.value is self:
                handle.kept, handle.value = handle.geometry.view(storage), None
                found.append(handle.index)
        return found

    def overwritten(self) -> None:
        """Rely on no memory that is about to hold something else."""
        self.origin = self.storage = None
        self.guards = ()

    def note_reader(self, call: weakref.ref[Call]) -> None:
        """A call reads it."""
        if isinstance(self.readers, list):
            self.readers.append(call)
        else:  # most have none or one, and a list each would burden the garbage collector
            self.readers = [*self.readers, call] if self.readers else (call,)

    def note_handle(self, handle: Handle) -> None:
        """Autograd has a handle on it."""
        if isinstance(self.handles, list):
            self.handles.append(weakref.ref(handle))
        else:
            self.handles = [*self.handles, weakref.ref(handle)] if self.handles else (weakref.ref(handle),)

    def owns(self, storage: torch.UntypedStorage, stream: Any) -> None:
        """Hold memory that the runtime allocated for it, on a compute stream; nobody else knows it yet."""
        self.storage, self.stream = storage, stream
        self.is_ours, self.is_handed_out = True, False
        self.origin, self.guards = None, ()

    def hand_out(self, handle: Handle) -> None:
        """Its memory goes to autograd through a handle, and perhaps to a program that writes it."""
        self.is_handed_out = True
        self.guard(handle.version_alias, handle.version)

    def forget_call(self, gone: object) -> None:
        """Let go of the call, and of all that is kept for it, if neither autograd nor a call will want the value.

        Called in backward alone: in forward another op may yet read or save what the program still holds.

        Args:
            gone: A handle or a call on it that goes right now.
        """
        for references in (self.handles, self.readers):
            for reference in references:
                user = reference()
                if user is not None and user is not gone:
                    return
        self.call = None

    def leave_origin(self) -> None:
        """Rely on the host copy or the call alone."""
        if self.origin is not None and self.storage is self.origin():
            self.storage = None
        self.origin = None
        self.guards = ()


class Ref(NamedTuple):
    """Stands for a tensor in the arguments of a recorded call."""

    value: LiveValue
    geometry: Geometry


@dataclasses.dataclass(frozen=True, slots=True)
class Blank:
    """Stands for a tensor that a recorded call writes without reading it: memory of its own will do."""

    num_bytes: int
    geometry: Geometry


class Call:
    """One dispatched call with its own arguments, ready to be replayed.

    Attributes:
        func: The overload.
        facts: Facts about it.
        args: Its positional arguments, tensors replaced by :class:`Ref` or :class:`Blank`.
        kwargs: Its keyword arguments, tensors replaced in the same way.
        inputs: The values it reads, each once.
        device: Where what it makes lies; what it makes elsewhere does not count.
        environment: The settings that it ran under.
        generator: The generator it drew from and its state before.
        is_flat: Whether all tensors among its arguments are positional ones, in no list.
        results: The values it made, by position; weak, since they own the call.
    """

    __slots__ = (
        "__weakref__", "args", "device", "environment", "facts", "func", "generator", "inputs", "is_flat", "kwargs",
        "results",
    )  # fmt: skip

    def __init__(
        self,
        func: Any,
        facts: OpFacts,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        inputs: tuple[LiveValue, ...],
        device: torch.device,
        environment: Environment,
        generator: tuple[torch.Generator, Tensor] | None,
        *,
        is_flat: bool,
    ) -> None:
        self.func = func
        self.facts = facts
        self.args = args
        self.kwargs = kwargs
        self.inputs = inputs
        self.device = device
        self.environment = environment
        self.generator = generator
        self.is_flat = is_flat
        self.results: dict[int, weakref.ref[LiveValue]] = {}

    @dynamo_disabled
    def __del__(self) -> None:
        if torch._C._current_graph_task_id() != -1:
            for value in self.inputs:
                if value.call is not None:
                    value.forget_call(self)


class StepLiveness(Allowance):
    """Held by everything of a step that autograd may still unpack; gone when the last of it is.

    Args:
        num_objects: How many objects the step makes that the garbage collector need not count meanwhile.
    """

    __slots__ = ()


class Handle:
    """What autograd holds in place of a saved tensor.

    Attributes:
        observer: Notified when autograd drops it; None for nobody.
        lease: Keeps the step from being over.
        index: Ordinal of its pack.
        kept: The tensor itself, or detached from its graph, where it is kept.
        value: What it reads; where the tensor is kept, only held for calls that read it too.
        geometry: How the saved tensor lies on the value's storage.
        version_alias: Shares the saved tensor's version counter.
        borrowed: A weak reference to that tensor where it is the program's own, which must stay as it is; while there
            is one, ``torch.utils.swap_tensors`` refuses to put another in its place. None otherwise.
        version: The version that was saved.
        is_out: Whether the tensor itself was handed out, which is somebody else's from then on.
        stream: That on which the op ran that saved it; None on a device without streams.
        shown: What a node of the program's own was given in its place: Note [gradients that are stolen].
    """

    __slots__ = (
        "__weakref__", "borrowed", "geometry", "index", "is_out", "kept", "lease", "observer", "shown", "stream",
        "value", "version", "version_alias",
    )  # fmt: skip

    def __init__(
        self,
        observer: StepObserver | None,
        lease: StepLiveness | None,
        index: int,
        tensor: Tensor,
        *,
        is_borrowed: bool = False,
    ) -> None:
        self.observer = observer
        self.lease = lease
        self.index = index
        self.version = tensor._version
        self.kept: Tensor | None = None
        self.value: LiveValue | None = None
        self.geometry: Geometry | None = None
        self.version_alias: Tensor = tensor
        self.borrowed = weakref.ref(tensor) if is_borrowed else None
        self.is_out = False
        self.stream: Any = None
        self.shown: Tensor | None = None

    @dynamo_disabled
    def __del__(self) -> None:
        if self.observer is not None:
            self.observer.on_release(self.index)
        value = self.value
        if value is not None and value.call is not None and torch._C._current_graph_task_id() != -1:
            value.forget_call(self)

    def come_after(self, lanes: CopyLanes) -> None:
        """Let what computes now come after the op that saved it."""
        if self.stream is not None:
            lanes.come_after(self.stream)

    def hold_apart(self) -> None:
        """Keep a tensor of its own in place of the program's, on the same memory."""
        if self.borrowed is not None and self.kept is not None:
            self.kept = self.version_alias = detached(self.kept)
            self.borrowed = None

    def owned_version_alias(self) -> Tensor:
        """A version alias that is not the program's own tensor, for who empties it, or refers to it for longer.

        Not to be asked for where ops are seen: what is made there shares no version counter.
        """
        if self.borrowed is not None:
            self.version_alias, self.borrowed = version_alias_of(self.version_alias), None
        return self.version_alias

    def let_go(self, value: LiveValue, geometry: Geometry) -> None:
        """Read a value from now on in place of the tensor itself."""
        self.value, self.geometry, self.kept = value, geometry, None
        emptied(self.owned_version_alias())
        value.note_handle(self)

    def watch(self, value: LiveValue) -> None:
        """Have a value notice writes by the version counter of what was saved, from the version that was."""
        value.guards = ((self.owned_version_alias(), self.version),)

    @property
    def was_written(self) -> bool:
        """Whether the saved tensor was modified in place since."""
        return self.version_alias._version != self.version

    def check_version(self) -> None:
        """Raise as plain autograd does if the saved tensor was modified in place.

        Raises:
            RuntimeError: It was.
        """
        if self.version_alias._version != self.version:
            size = self.geometry.size if self.geometry is not None else self.version_alias.shape
            raise_modified(self.version_alias, size, self.version)


def raise_modified(tensor: Tensor, size: Sequence[int], version: int, now: int | None = None) -> NoReturn:
    """Raise what plain autograd raises for a saved tensor that was modified in place.

    Args:
        tensor: It, or one of its type.
        size: Its size.
        version: The version that was saved.
        now: That at which it is; None for the tensor's own.

    Raises:
        RuntimeError: Always.
    """
    now = tensor._version if now is None else now
    raise RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{tensor.type()} {list(size)}] is at version {now}; expected version {version} instead. "
        "Hint: enable anomaly detection to find the operation that failed to compute its gradient, with "
        "torch.autograd.set_detect_anomaly(True)."
    )


_EMPTY: dict[tuple[torch.dtype, torch.device], Tensor] = {}


def version_alias_of(tensor: Tensor) -> Tensor:
    """A tensor without memory that shares another's version counter."""
    return emptied(detached(tensor))


def emptied(tensor: Tensor) -> Tensor:
    """A tensor of our own, without its memory from now on; it keeps its version counter."""
    tensor.data = _empty_like(tensor)
    return tensor


def share_counter(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors share one version counter; torch does not tell, so a write is counted and taken back."""
    version, before = one._version, other._version
    torch.autograd.graph.increment_version(one)
    is_shared: bool = other._version != before
    plain_set_version((one,), (version,))
    return is_shared


def seen_through(version_alias: Tensor, geometry: Geometry, storage: torch.UntypedStorage) -> Tensor:
    """What lies on a storage, behind the version counter of an alias of the tensor that was saved."""
    if isinstance(version_alias, FakeTensor):  # has no memory to put there
        return geometry.view(storage)
    shared = detached(version_alias)
    shared.data = geometry.view(storage, version_alias)
    return shared


def _empty_like(tensor: Tensor) -> Tensor:
    if isinstance(tensor, FakeTensor):
        return torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    key = (tensor.dtype, tensor.device)
    empty = _EMPTY.get(key)
    if empty is None:
        empty = _EMPTY[key] = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return empty


class _Origin(weakref.ref[torch.UntypedStorage]):
    __slots__ = ("key",)
    key: int


_Entries = dict[int, LiveValue | weakref.ref[LiveValue]]


class ValueTable:
    """Values by live storage, and by index in the step graph."""

    def __init__(self) -> None:
        self._entries: _Entries = {}
        self._by_index: dict[int, weakref.ref[LiveValue]] = {}
        self._forget = _forgetter(self._entries)

    def find(self, storage: torch.UntypedStorage) -> LiveValue | None:
        """The value that a storage holds, if it is followed."""
        entry = self._entries.get(storage._cdata)
        value = entry() if isinstance(entry, weakref.ref) else entry
        if value is None or value.origin is None or value.origin() is not storage:
            return None
        return value

    def indexed(self, index: int) -> LiveValue | None:
        """The live value on a storage of the step graph."""
        reference = self._by_index.get(index)
        return reference() if reference is not None else None

    def all_indexed(self) -> list[LiveValue]:
        """The live values on storages of the step graph."""
        values = [reference() for reference in self._by_index.values()]
        return [value for value in values if value is not None]

    def new(self, index: int, storage: torch.UntypedStorage) -> LiveValue:
        """Follow the value that a storage holds.

        Args:
            index: The storage's in the step graph, -1 outside a plan.
            storage: The storage.
        """
        value = LiveValue(index, storage.nbytes())
        self.follow(value, storage)
        return value

    def follow(self, value: LiveValue, storage: torch.UntypedStorage) -> None:
        """Know a value by its storage for as long as that lives."""
        origin = _Origin(storage, self._forget)
        origin.key = storage._cdata
        value.origin = origin
        self._entries[origin.key] = value
        if value.index >= 0:
            self._by_index[value.index] = weakref.ref(value)

    def name(self, value: LiveValue, index: int) -> None:
        """Know a followed value by an index in the step graph from now on."""
        value.index = index
        self._by_index[index] = weakref.ref(value)

    def own(self, value: LiveValue, storage: torch.UntypedStorage | None) -> None:
        """Let a value hold its memory; from then on it lives by who needs it."""
        if storage is not None:
            value.storage = storage
            if value.origin is not None:
                self._entries[storage._cdata] = weakref.ref(value)

    def hand_out(self, value: LiveValue, storage: torch.UntypedStorage, handle: Handle) -> None:
        """Autograd reads a value's memory: what happens to that from now on happens to the value."""
        if value.origin is None or value.origin() is not storage:
            self.follow(value, storage)
            self.own(value, storage)
        value.hand_out(handle)

    def drop(self, storage: torch.UntypedStorage) -> None:
        """Follow a storage's value no longer: it is about to be overwritten."""
        self._entries.pop(storage._cdata, None)

    def keep_watch(self) -> None:
        """From now on writes may go unseen, cf. :meth:`Value.keep_watch`."""
        for entry in list(self._entries.values()):
            value = entry() if isinstance(entry, weakref.ref) else entry
            if value is not None and (value.readers or value.handles):
                value.keep_watch()

    def close(self) -> None:
        """Keep watch, and let go of the values that nobody else needs."""
        self.keep_watch()
        for key, entry in list(self._entries.items()):
            if not isinstance(entry, weakref.ref):
                self._entries[key] = weakref.ref(entry)


def _forgetter(entries: _Entries) -> Callable[[Any], None]:
    """A callback that takes a storage that died out of the table; holds no table, takes no lock."""

    @dynamo_disabled
    def forget(origin: _Origin) -> None:
        entry = entries.get(origin.key)
        if not isinstance(entry, weakref.ref) and entry is not None and entry.origin is origin:
            entries.pop(origin.key, None)

    return forget
