"""What lanes observe in real steps, and how it corrects the rates that links were measured at.

A link measured alone is at its best; in steps both directions run at once, other processes copy too, and a disk's
cache fills up. What is worse than a rate lowers it by half of the difference at once: a plan that counts on too much
stalls. What is better raises it only when two steps in a row show it, as where the machine was busy when its links
were measured; a disk's rates are never raised, since its caches are fast for a while.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from lightning_offload.graph.device_spec import DeviceSpec

SMOOTHING = 0.5
"""Weight of one step's observation: a single slow step moves a rate half of the way, three in a row nearly all."""

MIN_BYTES = 8 << 20
"""Less than this is about latencies, not about rates."""

_LANES = {"d2h": "out", "h2d": "in", "disk_write": "disk_out", "disk_read": "disk_in"}
"""By link, as a spec names it: the lane, as an observation does."""


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
    rates: dict[str, Any] = {}
    for link, lane in _LANES.items():
        name = f"{link}_bytes_per_second"
        last = None if lane.startswith("disk") or before is None else _rate(before, lane)
        rates[name] = _moved(getattr(spec, name), _rate(observed, lane), last)
    return dataclasses.replace(spec, **rates)


def _rate(observed: Observed, lane: str) -> float | None:
    num_bytes, seconds = getattr(observed, f"{lane}_bytes"), getattr(observed, f"{lane}_seconds")
    return num_bytes / seconds if num_bytes >= MIN_BYTES and seconds > 0 else None


def _moved(rate: float, now: float | None, last: float | None) -> float:
    if now is None:
        return rate
    if now < rate:
        return rate + SMOOTHING * (now - rate)
    return max(rate, min(now, last)) if last is not None else rate
