"""The verify step: compares every recomputed tensor with its original before replays are trusted.

In the first step under a new plan the originals of recomputed values are swapped out as well. At unpack the
replayed bytes are compared with them; on a mismatch the step goes on with the original, and the storage is
reported so that the plan is made again without recomputing it. Catches kernels that write behind the
dispatcher's back, nondeterministic kernels, and anything else that makes a recorded call a lie.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Collection

import torch

from lightning_offload.errors import SpillError
from lightning_offload.runtime.copies import Block
from lightning_offload.runtime.tiers import Tiers
from lightning_offload.runtime.values import Value
from lightning_offload.tensors.geometry import Geometry, same_bits

_NOTEWORTHY_BYTES = 4096  # kernels leave small results (seeds, counters) undefined where nobody reads them
_log = logging.getLogger(__name__)


class Verifier:
    """Remembers originals and compares replays with them.

    Args:
        tiers: Where originals are remembered.
        on_mismatch: Told of each storage whose replay differed.
        trusted: Storages that need no comparison any more.

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
    ) -> None:
        self.mismatched: set[int] = set()
        self.verified: set[int] = set()
        self.num_verified = 0
        self._on_mismatch = on_mismatch
        self._tiers = tiers
        self._trusted = frozenset(trusted)

    def remember(self, value: Value, storage: torch.UntypedStorage) -> Block | None:
        """Copy an original to a lower tier; None where it is trusted, or the plan leaves no room (for a later step)."""
        if value.index in self._trusted:
            return None
        block = self._tiers.allocate(storage.nbytes(), is_spare=True)
        if block is None:
            return None
        try:
            self._tiers.swap_out(storage, block).synchronize()
        except SpillError:
            return None
        return block

    def verify(self, value: Value, storage: torch.UntypedStorage, geometry: Geometry) -> torch.UntypedStorage:
        """Compare a replayed value with its original, over the bytes that a saved tensor covers.

        Returns:
            The storage to read from: the replayed one, now holding the original if it differed.
        """
        assert value.original is not None
        self.num_verified += 1
        self.verified.add(value.index)
        original = self._tiers.bytes_of(value.original).untyped_storage()
        if same_bits(geometry.view(storage), dataclasses.replace(geometry, device=_HOST).view(original)):
            return storage
        if value.index not in self.mismatched:
            _log.log(
                logging.WARNING if value.num_bytes >= _NOTEWORTHY_BYTES else logging.DEBUG,
                "recomputing storage %d (%s %s) does not give the same bits; it is swapped or kept from now on",
                value.index, geometry.dtype, list(geometry.size),
            )  # fmt: skip
            if self._on_mismatch is not None:
                self._on_mismatch(value.index)
        self.mismatched.add(value.index)
        self._tiers.swap_in(value.original, storage).wait()
        return storage


_HOST = torch.device("cpu")
