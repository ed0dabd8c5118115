"""What lanes observe in real steps, and how it corrects the rates that links were measured at.

A link measured alone is at its best; in steps both directions run at once, other processes copy too, and a disk's
cache fills up. What is worse than a rate lowers it by half of the difference at once: a plan that counts on too much
stalls. What is better raises it only when two steps in a row show it, as where the machine was busy when its links
were measured; a disk's rates are never raised, since its caches are fast for a while.
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


def updated(spec: DeviceSpec, observed: Observed, before: Observed | None = None) -> DeviceSpec:
    """The spec with rates moved towards those observed in a step.

    For each link: ``rate + SMOOTHING * (observed - rate)`` where it was slower than its rate, the slower one of the
    last two observations where both were faster. A link keeps its rate if it copied less than :data:`MIN_BYTES`, or is
    not there (rate 0).

    Args:
        spec: What is known so far.
        observed: What the step showed.
        before: What the last measured step before it showed.
    """
    now, last = observed, before or Observed()
    return dataclasses.replace(
        spec,
        d2h_bytes_per_second=_moved(
            spec.d2h_bytes_per_second, _rate(now.out_bytes, now.out_seconds), _rate(last.out_bytes, last.out_seconds)
        ),
        h2d_bytes_per_second=_moved(
            spec.h2d_bytes_per_second, _rate(now.in_bytes, now.in_seconds), _rate(last.in_bytes, last.in_seconds)
        ),
        disk_write_bytes_per_second=_moved(
            spec.disk_write_bytes_per_second, _rate(now.disk_out_bytes, now.disk_out_seconds), None
        ),
        disk_read_bytes_per_second=_moved(
            spec.disk_read_bytes_per_second, _rate(now.disk_in_bytes, now.disk_in_seconds), None
        ),
    )


def _rate(num_bytes: int, seconds: float) -> float | None:
    return num_bytes / seconds if num_bytes >= MIN_BYTES and seconds > 0 else None


def _moved(rate: float, now: float | None, last: float | None) -> float:
    if now is None:
        return rate
    if now < rate:
        return rate + SMOOTHING * (now - rate)
    return max(rate, min(now, last)) if last is not None else rate
