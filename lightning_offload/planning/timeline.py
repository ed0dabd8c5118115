"""What a simulation is asked and what it answers: when copies are made, a step's memory and its duration."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

from lightning_offload.graph.memory_plan import Tier
from lightning_offload.planning.problem import Bytes

NO_LIMIT = 1 << 62
"""More bytes than there are."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """When copies are made, for policies that say so themselves.

    Attributes:
        release: By swapped storage: tick of the op before which its device copy is released; -1, at its pack, for
            the others.
        prefetch: By swapped storage: ordinal of the unpack at which its copy back is issued; -1, on demand, for the
            others. One that comes before the device copy is released, or after its need, is on demand.
    """

    release: Mapping[int, int]
    prefetch: Mapping[int, int]


ON_DEMAND = Schedule(release={}, prefetch={})
"""Every copy is waited for."""


class Outcome(NamedTuple):
    """What a search wants to know of a simulated step.

    Attributes:
        peak_bytes: Most bytes on the device at once.
        step_seconds: Duration.
        stall_seconds: Time that compute waits for copies.
        overflow_bytes: By how much the host would have to be larger; a choice with any is infeasible.
    """

    peak_bytes: int
    step_seconds: float
    stall_seconds: float
    overflow_bytes: int


NEVER = Outcome(NO_LIMIT, float("inf"), float("inf"), 0)
"""A step that was not simulated to its end."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """A simulated step.

    Attributes:
        memory: Live device bytes at each tick.
        peak_bytes: Its maximum.
        peak_tick: Where that is.
        step_seconds: Duration.
        stall_seconds: Time that compute waits for copies.
        release_tick: By swapped storage: tick at which its device copy is released; -1 at its pack.
        prefetch: By swapped storage: ordinal of the unpack at which its copy back is issued; -1 on demand. In the order
            of their needs, which is that of copies issued at the same unpack.
        tiers: By swapped storage: where it goes.
        host_peak_bytes: Most bytes on the host at once, each storage rounded up to what it takes there.
        disk_peak_bytes: The same for the disk.
        overflow_bytes: By how much the host would have to be larger; a choice with any is infeasible.
    """

    memory: Bytes
    peak_bytes: int
    peak_tick: int
    step_seconds: float
    stall_seconds: float
    release_tick: Mapping[int, int]
    prefetch: Mapping[int, int]
    tiers: Mapping[int, Tier]
    host_peak_bytes: int
    disk_peak_bytes: int
    overflow_bytes: int
