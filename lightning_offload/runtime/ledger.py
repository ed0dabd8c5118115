"""What a step keeps of what it saved, and what of it leaves the device once the op that saves it is done.

An op may write what it has saved, past any version counter, as ``rrelu`` does its noise: it is done when the next node
of autograd is made. The native core has a ledger of its own, with the same methods.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

from lightning_offload.runtime.values import Handle
from lightning_offload.tensors.saved_forms import SavedForm


class Late:
    """What leaves once the op that saves it is done."""

    def __init__(self) -> None:
        self._late: list[tuple[weakref.ref[Handle], int]] = []
        self._late_node = 0

    @property
    def is_due(self) -> bool:
        """Whether there is anything, and the op is done."""
        return bool(self._late) and next_node() != self._late_node

    def add_late(self, handle: Handle, index: int = -1) -> None:
        """Note a saved tensor of the op that runs, kept for now.

        Args:
            handle: Its handle.
            index: Its storage in the step graph; -1 for none.
        """
        self._late.append((weakref.ref(handle), index))
        self._late_node = next_node()

    def is_late(self, storage: torch.UntypedStorage) -> bool:
        """Whether a storage is among them."""
        return any(_keeps(reference(), storage) for reference, _ in self._late)

    def take_late(self) -> list[tuple[Handle, int]]:
        """All of them that autograd still holds, and nobody else; they are noted no longer."""
        late, self._late = self._late, []
        found = [(reference(), index) for reference, index in late]
        return [(h, index) for h, index in found if h is not None and h.kept is not None and not h.is_out]


class Ledger(Late):
    """The same, and what stays, under a plan for another structure.

    Attributes:
        kept_bytes: What stayed of what the step made and saved, in all.
        astray_bytes: What left that the plan does not have, or kept.
        fingerprint: Of what was saved: the same in two steps of one structure and the same sizes.
        places_fingerprint: The same whatever the sizes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kept_bytes = self.astray_bytes = 0
        self.fingerprint = self.places_fingerprint = 0
        self._alive = _Alive()
        self._stays: dict[int, weakref.ref[Handle]] = {}
        self._stays_too: list[weakref.ref[Handle]] = []  # for other saves of the same storages

    @property
    def alive_bytes(self) -> int:
        """What stays and autograd still holds."""
        return self._alive.num_bytes

    def note(self, place: int, form: SavedForm) -> None:
        """Note what was saved, and where that is in the plan."""
        self.fingerprint = hash((self.fingerprint, place, form))
        self.places_fingerprint = hash((self.places_fingerprint, place, form.kind))

    def stays(self, handle: Handle, storage: torch.UntypedStorage) -> None:
        """Count a storage for as long as autograd holds its first handle."""
        num_bytes = storage.nbytes()
        self.kept_bytes += num_bytes
        self._stays[storage._cdata] = weakref.ref(handle, self._alive.add(num_bytes))

    def is_staying(self, storage: torch.UntypedStorage) -> bool:
        """Whether a storage is counted."""
        reference = self._stays.get(storage._cdata)
        return reference is not None and _keeps(reference(), storage)

    def stays_too(self, handle: Handle) -> None:
        """Note another handle on one that is."""
        self._stays_too.append(weakref.ref(handle))

    def let_all_go(self) -> None:
        """Have all that stays leave once the op is done that runs."""
        going = (reference() for reference in (*self._stays.values(), *self._stays_too))
        for handle in sorted((handle for handle in going if handle is not None), key=lambda handle: handle.index):
            self.add_late(handle)
        self._stays, self._stays_too, self._alive = {}, [], _Alive()


class _Alive:
    """Counts the bytes of what is kept, for as long as autograd holds it."""

    def __init__(self) -> None:
        self.num_bytes = 0

    def add(self, num_bytes: int) -> Callable[[object], None]:
        """Count more; gives what takes them off again."""
        self.num_bytes += num_bytes

        def gone(_: object) -> None:
            self.num_bytes -= num_bytes

        return gone


def _keeps(handle: Handle | None, storage: torch.UntypedStorage) -> bool:
    kept = handle.kept if handle is not None else None
    return kept is not None and kept.untyped_storage()._cdata == storage._cdata


def next_node() -> int:
    """The sequence number of the next node that autograd makes in this thread."""
    number: int = torch._C._autograd._get_sequence_nr()
    return number
