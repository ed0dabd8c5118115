"""Rates follow what real steps show: downwards at once, upwards when it is shown twice."""

from __future__ import annotations

import dataclasses

import pytest

from lightning_offload.graph.memory_plan import Tier
from lightning_offload.plugins.link_rates import MIN_BYTES, updated
from lightning_offload.runtime.lanes import LaneTimes
from tests.graph.building import DEVICE

SPEC = dataclasses.replace(
    DEVICE,
    d2h_bytes_per_second=100e9,
    h2d_bytes_per_second=80e9,
    disk_write_bytes_per_second=2e9,
    disk_read_bytes_per_second=4e9,
)


def test_a_slower_link_is_lowered_half_of_the_way() -> None:
    """Each link moves towards its own observation."""
    did = {
        "host": LaneTimes(out_bytes=10**9, out_seconds=0.02, in_bytes=10**9, in_seconds=0.025),  # 50 and 40 GB/s
        "disk": LaneTimes(out_bytes=10**9, out_seconds=1.0, in_bytes=10**9, in_seconds=0.5),
    }
    assert updated(SPEC, did) == dataclasses.replace(
        SPEC,
        d2h_bytes_per_second=75e9,
        h2d_bytes_per_second=60e9,
        disk_write_bytes_per_second=1.5e9,
        disk_read_bytes_per_second=3e9,
    )


def copying(gigabytes_per_second: float) -> dict[Tier, LaneTimes]:
    """A step in which all links copied at a rate."""
    seconds = 1 / gigabytes_per_second
    times = LaneTimes(out_bytes=10**9, out_seconds=seconds, in_bytes=10**9, in_seconds=seconds)
    return {"host": times, "disk": times}


def swapping_out(num_bytes: int, seconds: float, tier: Tier = "host") -> dict[Tier, LaneTimes]:
    """A step in which one link copied."""
    return {tier: LaneTimes(out_bytes=num_bytes, out_seconds=seconds)}


def test_a_link_that_was_faster_once_keeps_its_rate() -> None:
    """It may have been luck, and a plan that counts on too much stalls."""
    assert updated(SPEC, copying(200)) == SPEC
    assert updated(SPEC, copying(200), before=copying(4)) == SPEC
    assert updated(SPEC, copying(200), before=swapping_out(MIN_BYTES - 1, 1e-9)) == SPEC


def test_a_link_that_is_faster_twice_is_raised() -> None:
    """To the slower one of both observations; the disk's rates stay, its caches are fast for a while."""
    raised = dataclasses.replace(SPEC, d2h_bytes_per_second=120e9, h2d_bytes_per_second=120e9)
    for now, before in ((120, 200), (200, 120)):
        found = updated(SPEC, copying(now), before=copying(before))
        assert found.d2h_bytes_per_second == pytest.approx(raised.d2h_bytes_per_second)
        assert found.h2d_bytes_per_second == pytest.approx(raised.h2d_bytes_per_second)
        assert found.disk_write_bytes_per_second == SPEC.disk_write_bytes_per_second
        assert found.disk_read_bytes_per_second == SPEC.disk_read_bytes_per_second


def test_little_traffic_says_nothing() -> None:
    """Small copies are about latencies, and nothing copied is no rate at all."""
    assert updated(SPEC, swapping_out(MIN_BYTES - 1, 10.0)) == SPEC
    assert updated(SPEC, swapping_out(MIN_BYTES, 0.0)) == SPEC
    assert updated(SPEC, {}) == SPEC


def test_repeated_observations_converge() -> None:
    """A link that stays slow ends at what was observed, never below."""
    spec, did = SPEC, swapping_out(10**9, 0.1)
    for _ in range(20):
        spec = updated(spec, did)
        assert spec.d2h_bytes_per_second >= 10e9
    assert spec.d2h_bytes_per_second < 10.01e9


def test_a_disk_that_is_not_there_stays_away() -> None:
    """A rate of 0 means no disk tier, whatever was observed."""
    spec = dataclasses.replace(SPEC, disk_write_bytes_per_second=0.0)
    assert updated(spec, swapping_out(10**9, 1.0, "disk")).disk_write_bytes_per_second == 0.0
