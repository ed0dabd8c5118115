"""Which tier each swapped storage goes to, and whether the tiers have room.

All of it goes to the host where that has room. Where it has not, and there is a disk, the storages that are away
longest go to disk, until what is on the host at once fits: a slow tier is hidden best behind a long absence.
Without a disk a choice that does not fit is infeasible, and planners take from :class:`HostRoom` what they swap.
What a storage takes, and for how long, is what :mod:`~lightning_offload.graph.host_layout` says.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from lightning_offload.graph.device_spec import DeviceSpec
from lightning_offload.graph.host_layout import stored_bytes
from lightning_offload.planning.problem import Problem

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TierChoice:
    """Where swapped storages go.

    Attributes:
        on_disk: By candidate: 1 if a swap of it goes to disk, 0 if to the host.
        host_peak_bytes: Most bytes on the host at once.
        disk_peak_bytes: Most bytes on the disk at once.
        overflow_bytes: By how much the host's peak exceeds what it may hold, where there is no disk.
    """

    on_disk: Ints
    host_peak_bytes: int
    disk_peak_bytes: int
    overflow_bytes: int


def choose_tiers(problem: Problem, swapped: Ints, ends: Ints, away_seconds: Floats, device: DeviceSpec) -> TierChoice:
    """Choose tiers.

    Args:
        problem: The step.
        swapped: Numbers of the candidates that are swapped.
        ends: By saved storage: first tick at which its copy is not needed any more.
        away_seconds: By swapped storage: from its pack to its first need; read where the host has a limit.
        device: The tiers.
    """
    limit, num_on_disk = device.host_memory_bytes, 0
    if limit is not None and device.has_disk:
        swapped = swapped[np.lexsort((problem.order[swapped], -away_seconds))]
    stacks = _Stacks(problem, swapped, ends)
    if limit is not None and device.has_disk:
        num_on_disk = stacks.num_too_many(limit)
    on_disk: Ints = np.zeros(len(problem.order), dtype=np.int64)
    on_disk[swapped[:num_on_disk]] = 1
    host_peak_bytes = stacks.peak_bytes(num_on_disk, len(swapped))
    return TierChoice(
        on_disk=on_disk,
        host_peak_bytes=host_peak_bytes,
        disk_peak_bytes=stacks.peak_bytes(0, num_on_disk),
        overflow_bytes=max(0, host_peak_bytes - limit) if limit is not None else 0,
    )


class _Stacks:
    """Bytes over time of slices of an ordered list of swapped storages."""

    def __init__(self, problem: Problem, swapped: Ints, ends: Ints) -> None:
        stored = problem.stored
        self._begins, self._ends, self._sizes = stored.begin[swapped], ends[swapped], stored.num_bytes[swapped]
        self._num_ticks = problem.graph.num_ticks

    def peak_bytes(self, first: int, last: int) -> int:
        if first == last:
            return 0
        delta: Ints = np.zeros(self._num_ticks + 1, dtype=np.int64)
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
