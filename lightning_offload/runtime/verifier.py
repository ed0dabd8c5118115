"""The verify step: compares every recomputed tensor with its original before replays are trusted.

In the first step under a new plan the originals of recomputed values are swapped out as well. At unpack the
replayed bytes are compared with them; on a mismatch the step goes on with the original, and the storage is
reported so that the plan is made again without recomputing it. Catches kernels that write behind the
dispatcher's back, nondeterministic kernels, and anything else that makes a recorded call a lie. A replay that fails
counts as one that differs. Where there is no room for an original the replay is tried at once, while the original is
on the device: Note [Rehearsals]. So no value is given up in this step that could not be had again.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection

import torch

from lightning_offload.errors import SpillError
from lightning_offload.runtime.lanes import Block
from lightning_offload.runtime.tiers import Tiers
from lightning_offload.runtime.values import LiveValue
from lightning_offload.tensors.geometry import Geometry, same_bits

_NOTEWORTHY_BYTES = 4096  # kernels leave small results (seeds, counters) undefined where nobody reads them
_SPARE_BYTES = 2 << 20  # for results of one element, each in a block of the allocator's
_log = logging.getLogger(__name__)


class Verifier:
    """Remembers originals and compares replays with them.

    Args:
        tiers: Where originals are remembered.
        on_mismatch: Told of each storage whose replay differed.
        trusted: Storages that need no comparison any more.
        room: Bytes of device memory that nobody needs now, where comparisons are better made on the device: a host
            takes long to fetch and to compare. None where the device is the host.

    Attributes:
        mismatched: Storages (indices in the graph) whose replay differed.
        verified: Storages whose replay was compared.
        num_verified: Comparisons made.
    """

    def __init__(
        self,
        tiers: Tiers,
        on_mismatch: Callable[[int], None] | None = None,
        trusted: Collection[int] = (),
        room: Callable[[], int] | None = None,
    ) -> None:
        self.mismatched: set[int] = set()
        self.verified: set[int] = set()
        self.num_verified = 0
        self._on_mismatch = on_mismatch
        self._tiers = tiers
        self._trusted = frozenset(trusted)
        self._room = room

    def doubts(self, value: LiveValue) -> bool:
        """Whether a value's replay is not trusted yet."""
        return value.index not in self._trusted

    def remember(self, storage: torch.UntypedStorage) -> Block | None:
        """Copy an original to a lower tier; None where the plan leaves no room."""
        block = self._tiers.allocate(storage.nbytes(), is_spare=True)
        if block is None:
            return None
        try:
            self._tiers.swap_out(storage, block).synchronize()
        except SpillError:
            return None
        return block

    def verify(self, value: LiveValue, storage: torch.UntypedStorage, geometry: Geometry) -> torch.UntypedStorage:
        """Compare a replayed value with its original, over the bytes that a saved tensor covers.

        Returns:
            The storage to read from: the replayed one, now holding the original if it differed.
        """
        assert value.original is not None
        if not self._is_same(value, geometry.view(storage), self._original(value.original, storage, geometry)):
            self.mismatch(value, geometry, "it does not give the same bits")
            self._tiers.swap_in(value.original, storage).wait()
        return storage

    def _original(self, block: Block, replayed: torch.UntypedStorage, geometry: Geometry) -> torch.Tensor:
        """An original beside its replay, where there is room for it and for what a comparison makes, or on the host."""
        num_bytes = replayed.nbytes()
        if self._room is not None and num_bytes and self._room() >= 2 * num_bytes + _SPARE_BYTES:
            with contextlib.suppress(torch.OutOfMemoryError):
                original = torch.UntypedStorage(num_bytes, device=replayed.device)
                self._tiers.swap_in(block, original).wait()
                return geometry.view(original)
        return geometry._replace(device=_HOST).view(self._tiers.bytes_of(block).untyped_storage())

    def compare(
        self, value: LiveValue, replayed: torch.UntypedStorage, original: torch.UntypedStorage, geometry: Geometry
    ) -> bool:
        """Compare a replayed value with its original on the device; whether they agree."""
        if self._is_same(value, geometry.view(replayed), geometry.view(original)):
            return True
        self.mismatch(value, geometry, "it does not give the same bits")
        return False

    def refute(self, value: LiveValue, storage: torch.UntypedStorage, error: Exception) -> None:
        """A replay failed: give the original in its place."""
        assert value.original is not None
        self._tiers.swap_in(value.original, storage).wait()
        self.mismatch(value, None, str(error))

    def _is_same(self, value: LiveValue, replayed: torch.Tensor, original: torch.Tensor) -> bool:
        self.num_verified += 1
        self.verified.add(value.index)
        return same_bits(replayed, original)

    def mismatch(self, value: LiveValue, geometry: Geometry | None, why: str) -> None:
        """Note that a value must not be recomputed."""
        if value.index not in self.mismatched:
            _log.log(
                logging.WARNING if value.num_bytes >= _NOTEWORTHY_BYTES else logging.DEBUG,
                "storage %d (%s) is not recomputed but swapped or kept from now on: %s",
                value.index,
                f"{value.num_bytes} bytes" if geometry is None else f"{geometry.dtype} {list(geometry.size)}",
                why,
            )
            if self._on_mismatch is not None:
                self._on_mismatch(value.index)
        self.mismatched.add(value.index)


_HOST = torch.device("cpu")
