"""Which value each live storage holds: identity by the storage object itself, never by its address.

torch keeps the Python object of a storage for as long as the storage lives, so a weak reference to it is an
identity, and its callback the moment of its death. A value that owns no memory is held by this table while its
storage lives; one that owns memory is only referred to weakly, and lives by who needs it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from lightning_offload.runtime.values import Handle, Value


class _Origin(weakref.ref[torch.UntypedStorage]):
    __slots__ = ("key",)
    key: int


_Entries = dict[int, Value | weakref.ref[Value]]


class ValueTable:
    """Values by live storage, and by index in the step graph."""

    def __init__(self) -> None:
        self._entries: _Entries = {}
        self._by_index: dict[int, weakref.ref[Value]] = {}
        self._forget = _forgetter(self._entries)

    def find(self, storage: torch.UntypedStorage) -> Value | None:
        """The value that a storage holds, if it is followed."""
        entry = self._entries.get(storage._cdata)
        value = entry() if isinstance(entry, weakref.ref) else entry
        if value is None or value.origin is None or value.origin() is not storage:
            return None
        return value

    def indexed(self, index: int) -> Value | None:
        """The live value on a storage of the step graph."""
        reference = self._by_index.get(index)
        return reference() if reference is not None else None

    def all_indexed(self) -> list[Value]:
        """The live values on storages of the step graph."""
        values = [reference() for reference in self._by_index.values()]
        return [value for value in values if value is not None]

    def follow(self, value: Value, storage: torch.UntypedStorage) -> None:
        """Know a value by its storage for as long as that lives."""
        origin = _Origin(storage, self._forget)
        origin.key = storage._cdata
        value.origin = origin
        self._entries[origin.key] = value
        if value.index >= 0:
            self._by_index[value.index] = weakref.ref(value)

    def own(self, value: Value, storage: torch.UntypedStorage | None) -> None:
        """Let a value hold its memory; from then on it lives by who needs it."""
        if storage is not None:
            value.storage = storage
            if value.origin is not None:
                self._entries[storage._cdata] = weakref.ref(value)

    def hand_out(self, value: Value, storage: torch.UntypedStorage, handle: Handle) -> None:
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

    def forget(origin: _Origin) -> None:
        entry = entries.get(origin.key)
        if not isinstance(entry, weakref.ref) and entry is not None and entry.origin is origin:
            entries.pop(origin.key, None)

    return forget
