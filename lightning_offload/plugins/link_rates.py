"""What lanes observe in real steps, and how it corrects the rates that links were measured at.

A link measured alone is at its best; in steps both directions run at once, other processes copy too, and a disk's
cache fills up. What is worse than a rate lowers it by half of the difference at once: a plan that counts on too much
stalls. What is better raises it only when two steps in a row show it, as where the machine was busy when its links
were measured; a disk's rates are never raised, since its caches are fast for a while.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from lightning_offload.graph.device_spec import DeviceSpec
from lightning_offload.graph.memory_plan import Tier
from lightning_offload.runtime.lanes import LaneTimes

SMOOTHING = 0.5
"""Weight of one step's observation: a single slow step moves a rate half of the way, three in a row nearly all."""

MIN_BYTES = 8 << 20
"""Less than this is about latencies, not about rates."""

_LANES: dict[str, tuple[Tier, str]] = {
    "d2h": ("host", "out"), "h2d": ("host", "in"), "disk_write": ("disk", "out"), "disk_read": ("disk", "in")
}  # fmt: skip
"""By link, as a spec names it: the tier, and the direction as its lanes name that."""

LanesDid = Mapping[Tier, LaneTimes]
"""By tier: what its lanes did in one step."""


def updated(spec: DeviceSpec, did: LanesDid, before: LanesDid | None = None) -> DeviceSpec:
    """The spec with rates moved towards those observed in a step.

    For each link: ``rate + SMOOTHING * (observed - rate)`` where it was slower than its rate, the slower one of the
    last two observations where both were faster. A link keeps its rate if it copied less than :data:`MIN_BYTES`, or is
    not there (rate 0).

    Args:
        spec: What is known so far.
        did: What the step showed.
        before: What the last measured step before it showed.
    """
    rates: dict[str, Any] = {}
    for link, (tier, direction) in _LANES.items():
        name = f"{link}_bytes_per_second"
        last = None if tier == "disk" or before is None else _rate(before, tier, direction)
        rates[name] = _moved(getattr(spec, name), _rate(did, tier, direction), last)
    return dataclasses.replace(spec, **rates)


def _rate(did: LanesDid, tier: Tier, direction: str) -> float | None:
    times = did.get(tier)
    num_bytes, seconds = getattr(times, f"{direction}_bytes", 0), getattr(times, f"{direction}_seconds", 0.0)
    return num_bytes / seconds if num_bytes >= MIN_BYTES and seconds > 0 else None


def _moved(rate: float, now: float | None, last: float | None) -> float:
    if now is None:
        return rate
    if now < rate:
        return rate + SMOOTHING * (now - rate)
    return max(rate, min(now, last)) if last is not None else rate
