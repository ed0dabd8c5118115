"""What fits a host of limited size without a disk behind it: planners take from :class:`HostRoom` what they swap.

Which tier each storage goes to is chosen in each simulation (:mod:`~lightning_offload.planning.kernels.tiers`). What
one takes, and for how long, is what :mod:`~lightning_offload.graph.host_layout` says.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from lightning_offload.graph.device_spec import DeviceSpec
from lightning_offload.graph.host_layout import stored_bytes
from lightning_offload.planning.problem import Problem

Ints = npt.NDArray[np.int64]


def short_host_bytes(device: DeviceSpec) -> int | None:
    """The most that can be swapped, where there is no disk behind a host of limited size; None for no limit."""
    return None if device.has_disk else device.host_memory_bytes


class HostRoom:
    """What may still be swapped to a host of limited size, whatever is recomputed of what may be.

    Args:
        problem: The step.
        limit_bytes: What the host may hold.
        recomputed: All storages that may be recomputed.
    """

    def __init__(self, problem: Problem, limit_bytes: int, recomputed: Iterable[int]) -> None:
        stays, ends = problem.stays, problem.stays.ends(recomputed)
        self._storages = problem.graph.storages
        self._limit = limit_bytes
        # What is used rises only where a stay begins, so its maximum over a stay is found at one of those ticks.
        rises = np.unique(np.fromiter(stays.begin.values(), dtype=np.int64))
        self._first = dict(zip(stays.begin, np.searchsorted(rises, list(stays.begin.values())).tolist(), strict=True))
        self._last = dict(zip(ends, np.searchsorted(rises, list(ends.values())).tolist(), strict=True))
        self._used: Ints = np.zeros(len(rises), dtype=np.int64)

    def take(self, storage: int) -> bool:
        """Swap a storage if it fits beside what was taken before; whether it does."""
        num_bytes = stored_bytes(self._storages[storage].num_bytes)
        used = self._used[self._first[storage] : self._last[storage]]
        if num_bytes + int(used.max(initial=0)) > self._limit:
            return False
        used += num_bytes
        return True
