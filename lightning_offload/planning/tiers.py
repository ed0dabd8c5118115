"""Which tier each swapped storage goes to, and whether the tiers have room.

All of it goes to the host where that has room. Where it has not, and there is a disk, the storages that are away
longest go to disk, until what is on the host at once fits: a slow tier is hidden best behind a long absence.
Without a disk a choice that does not fit is infeasible, and planners take from :class:`HostRoom` what they swap.
What a storage takes, and for how long, is what :mod:`~lightning_offload.graph.stays` says.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from lightning_offload.graph.device_spec import DeviceSpec
from lightning_offload.graph.memory_plan import Tier
from lightning_offload.graph.stays import stored_bytes
from lightning_offload.planning.problem import Candidate, Problem

_Ints = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TierChoice:
    """Where swapped storages go.

    Attributes:
        tiers: By swapped storage.
        host_peak_bytes: Most bytes on the host at once.
        disk_peak_bytes: Most bytes on the disk at once.
        overflow_bytes: By how much the host's peak exceeds what it may hold, where there is no disk.
    """

    tiers: Mapping[int, Tier]
    host_peak_bytes: int
    disk_peak_bytes: int
    overflow_bytes: int


def choose_tiers(
    problem: Problem,
    swapped: Sequence[Candidate],
    recomputed: Iterable[int],
    away_seconds: Mapping[int, float],
    device: DeviceSpec,
) -> TierChoice:
    """Choose tiers.

    Args:
        problem: The step.
        swapped: What is swapped.
        recomputed: The storages that are recomputed.
        away_seconds: By swapped storage: from its pack to its first need; read where the host has a limit.
        device: The tiers.
    """
    limit = device.host_memory_bytes
    if not swapped:
        return TierChoice(tiers={}, host_peak_bytes=0, disk_peak_bytes=0, overflow_bytes=0)
    if limit is not None and device.has_disk:
        swapped = sorted(swapped, key=lambda c: (-away_seconds[c.storage], c.storage))
    stacks = _Stacks(problem, swapped, recomputed)
    num_on_disk = 0
    if limit is not None and device.has_disk:
        num_on_disk = stacks.num_too_many(limit)
    host_peak_bytes = stacks.peak_bytes(num_on_disk, len(swapped))
    return TierChoice(
        tiers={c.storage: "disk" if i < num_on_disk else "host" for i, c in enumerate(swapped)},
        host_peak_bytes=host_peak_bytes,
        disk_peak_bytes=stacks.peak_bytes(0, num_on_disk),
        overflow_bytes=max(0, host_peak_bytes - limit) if limit is not None else 0,
    )


class _Stacks:
    """Bytes over time of slices of an ordered list of swapped storages."""

    def __init__(self, problem: Problem, swapped: Sequence[Candidate], recomputed: Iterable[int]) -> None:
        ends = problem.stays.ends(recomputed)
        self._begins: _Ints = np.array([problem.stays.begin[c.storage] for c in swapped], dtype=np.int64)
        self._ends: _Ints = np.array([ends[c.storage] for c in swapped], dtype=np.int64)
        self._sizes: _Ints = np.array([stored_bytes(c.num_bytes) for c in swapped], dtype=np.int64)
        self._num_ticks = problem.graph.num_ticks

    def peak_bytes(self, first: int, last: int) -> int:
        if first == last:
            return 0
        delta: _Ints = np.zeros(self._num_ticks + 1, dtype=np.int64)
        np.add.at(delta, self._begins[first:last], self._sizes[first:last])
        np.subtract.at(delta, self._ends[first:last], self._sizes[first:last])
        return int(np.cumsum(delta).max())

    def num_too_many(self, limit: int) -> int:
        """How many from the start of the list must go elsewhere, so that the rest fits."""
        low, high = 0, len(self._sizes)
        while low < high:
            middle = (low + high) // 2
            if self.peak_bytes(middle, len(self._sizes)) <= limit:
                high = middle
            else:
                low = middle + 1
        return low


def must_fit_host(device: DeviceSpec) -> bool:
    """Whether there is a limit to what can be swapped."""
    return device.host_memory_bytes is not None and not device.has_disk


class HostRoom:
    """What may still be swapped to a host of limited size, whatever is recomputed of what may be.

    Args:
        problem: The step.
        limit_bytes: What the host may hold.
        recomputed: All storages that may be recomputed.
    """

    def __init__(self, problem: Problem, limit_bytes: int, recomputed: Iterable[int]) -> None:
        self._problem = problem
        self._limit = limit_bytes
        self._ends = problem.stays.ends(recomputed)
        self._used: _Ints = np.zeros(problem.graph.num_ticks + 1, dtype=np.int64)

    def take(self, storage: int) -> bool:
        """Swap a storage if it fits beside what was taken before; whether it does."""
        num_bytes = stored_bytes(self._problem.graph.storages[storage].num_bytes)
        used = self._used[self._problem.stays.begin[storage] : self._ends[storage]]
        if num_bytes + int(used.max(initial=0)) > self._limit:
            return False
        used += num_bytes
        return True
