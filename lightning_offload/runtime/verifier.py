"""The verify step: compares every recomputed tensor with its original before replays are trusted.

In the first step under a new plan the originals of recomputed values are swapped out as well. At unpack the
replayed bytes are compared with them; on a mismatch the step goes on with the original, and the storage is
reported so that the plan is made again without recomputing it. Catches kernels that write behind the
dispatcher's back, nondeterministic kernels, and anything else that makes a recorded call a lie.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable

import torch

from lightning_offload.runtime.host_pool import HostBlock, HostPool
from lightning_offload.runtime.lanes import Lanes, host_bytes
from lightning_offload.runtime.values import Value
from lightning_offload.tensors.geometry import Geometry, same_bits

_log = logging.getLogger(__name__)


class Verifier:
    """Remembers originals and compares replays with them.

    Attributes:
        mismatched: Storages (indices in the graph) whose replay differed.
        verified: Storages whose replay was compared.
        num_verified: Comparisons made.
    """

    def __init__(self, lanes: Lanes, pool: HostPool, on_mismatch: Callable[[int], None] | None = None) -> None:
        self.mismatched: set[int] = set()
        self.verified: set[int] = set()
        self.num_verified = 0
        self._on_mismatch = on_mismatch
        self._lanes = lanes
        self._pool = pool

    def remember(self, storage: torch.UntypedStorage) -> HostBlock | None:
        """Copy an original to the host; None where the host has no room for it (it goes unverified)."""
        block = self._pool.allocate(storage.nbytes())
        if block is not None:
            self._lanes.swap_out(storage, block).wait()
        return block

    def verify(self, value: Value, storage: torch.UntypedStorage, geometry: Geometry) -> torch.UntypedStorage:
        """Compare a replayed value with its original, over the bytes that a saved tensor covers.

        Returns:
            The storage to read from: the replayed one, now holding the original if it differed.
        """
        assert value.original is not None
        self.num_verified += 1
        self.verified.add(value.index)
        on_host = dataclasses.replace(geometry, device=_HOST).view(host_bytes(value.original).untyped_storage())
        if same_bits(geometry.view(storage), on_host):
            return storage
        if value.index not in self.mismatched:
            _log.warning(
                "recomputing storage %d (%s %s) does not give the same bits; it is swapped or kept from now on",
                value.index, geometry.dtype, list(geometry.size),
            )  # fmt: skip
            if self._on_mismatch is not None:
                self._on_mismatch(value.index)
        self.mismatched.add(value.index)
        self._lanes.swap_in(value.original, storage).wait()
        return storage


_HOST = torch.device("cpu")
