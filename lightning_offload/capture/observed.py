"""What lanes observe in real steps, and how it corrects the rates that links were measured at.

A link measured alone is at its best; in steps both directions run at once, other processes copy too, and a disk's
cache fills up. Rates only follow what is worse than they are: a step that copies little shows nothing of what the
link could do, whereas one that copies slowly shows what a plan may count on.
"""

from __future__ import annotations

import dataclasses

from lightning_offload.graph.device_spec import DeviceSpec

SMOOTHING = 0.5
"""Weight of one step's observation: a single slow step moves a rate half of the way, three in a row nearly all."""

MIN_BYTES = 8 << 20
"""Less than this is about latencies, not about rates."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """What the lanes of a device did in one step.

    Seconds are those in which a lane was copying, waits for its turn aside.

    Attributes:
        out_bytes: Swapped out to the host.
        out_seconds: Duration of these copies.
        in_bytes: Swapped in from the host.
        in_seconds: Duration of these copies.
        disk_out_bytes: Written to the disk tier.
        disk_out_seconds: Duration of these writes.
        disk_in_bytes: Read from the disk tier.
        disk_in_seconds: Duration of these reads.
        stall_seconds: Time that compute waited for any of them.
    """

    out_bytes: int = 0
    out_seconds: float = 0.0
    in_bytes: int = 0
    in_seconds: float = 0.0
    disk_out_bytes: int = 0
    disk_out_seconds: float = 0.0
    disk_in_bytes: int = 0
    disk_in_seconds: float = 0.0
    stall_seconds: float = 0.0


def updated(spec: DeviceSpec, observed: Observed) -> DeviceSpec:
    """The spec with rates lowered towards those observed in a step.

    For each link: ``rate + SMOOTHING * (min(rate, observed) - rate)``. A link keeps its rate if it copied less than
    :data:`MIN_BYTES`, was faster than it, or is not there (rate 0).
    """
    o = observed
    return dataclasses.replace(
        spec,
        d2h_bytes_per_second=_lowered(spec.d2h_bytes_per_second, o.out_bytes, o.out_seconds),
        h2d_bytes_per_second=_lowered(spec.h2d_bytes_per_second, o.in_bytes, o.in_seconds),
        disk_write_bytes_per_second=_lowered(spec.disk_write_bytes_per_second, o.disk_out_bytes, o.disk_out_seconds),
        disk_read_bytes_per_second=_lowered(spec.disk_read_bytes_per_second, o.disk_in_bytes, o.disk_in_seconds),
    )


def _lowered(rate: float, num_bytes: int, seconds: float) -> float:
    if num_bytes < MIN_BYTES or seconds <= 0:
        return rate
    return rate + SMOOTHING * (min(rate, num_bytes / seconds) - rate)
