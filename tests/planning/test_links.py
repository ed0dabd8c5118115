"""The copy lanes on the simulated clock, with exact times."""

from __future__ import annotations

import dataclasses

import pytest

from lightning_offload.planning.links import in_rates, out_rates
from tests.graph.building import DEVICE
from tests.planning.reference_lanes import Deadlines, Direction, Lanes

CPU = dataclasses.replace(DEVICE, disk_write_bytes_per_second=10.0, disk_read_bytes_per_second=20.0)
"""Links of 100 B/s, a disk that writes at 10 B/s and reads at 20 B/s."""
GPU = dataclasses.replace(CPU, kind="cuda")
FAST_DISK = dataclasses.replace(GPU, disk_write_bytes_per_second=400.0, disk_read_bytes_per_second=400.0)


def test_copies_to_one_tier_follow_one_another() -> None:
    """A copy begins when it is issued, when the one before has ended, or when it may: whatever is latest."""
    lane = Direction(out_rates(DEVICE))
    assert lane.run(50, "host", 1.0) == 1.5
    assert lane.run(50, "host", 1.0) == 2.0
    assert lane.run(50, "host", 4.0) == 4.5
    assert lane.run(50, "host", 4.0, after=6.0) == 6.5


def test_disk_and_host_have_lanes_of_their_own_on_a_cpu() -> None:
    """A slow disk delays the next disk copy, and no copy between memory and memory."""
    lane = Direction(out_rates(CPU))
    assert lane.run(50, "disk", 0.0) == 5.0
    assert lane.run(50, "host", 0.0) == 0.5
    assert lane.run(50, "disk", 0.0) == 10.0
    assert lane.run(50, "disk", 20.0, after=21.0) == 26.0


def test_disk_copies_keep_the_link_of_a_device_busy() -> None:
    """Their bytes take the link for half a second, so a host copy issued then waits for that long."""
    lane = Direction(out_rates(GPU))
    assert lane.run(50, "disk", 0.0) == 5.0
    assert lane.run(50, "host", 0.0) == 1.0
    assert lane.run(50, "disk", 0.0) == 10.0
    assert lane.run(50, "host", 0.0) == 2.0


def test_disk_copies_wait_for_a_busy_link() -> None:
    """A disk copy behind two seconds of host copies begins after them."""
    lane = Direction(out_rates(GPU))
    assert lane.run(200, "host", 0.0) == 2.0
    assert lane.run(50, "disk", 0.0) == 7.0
    cpu = Direction(out_rates(CPU))
    assert cpu.run(200, "host", 0.0) == 2.0
    assert cpu.run(50, "disk", 0.0) == 5.0


def test_disk_is_no_faster_than_the_link_before_it() -> None:
    """The lesser of both rates, but for a CPU, whose disk has no link before it."""
    assert Direction(out_rates(FAST_DISK)).run(100, "disk", 0.0) == 1.0
    assert Direction(in_rates(FAST_DISK)).run(100, "disk", 0.0) == 1.0
    assert Direction(out_rates(dataclasses.replace(FAST_DISK, kind="cpu"))).run(100, "disk", 0.0) == 0.25


def test_rates_differ_by_direction() -> None:
    """Writing and reading, out and in, each have their own."""
    uneven = dataclasses.replace(GPU, d2h_bytes_per_second=50.0)
    assert [out_rates(uneven).of(tier) for tier in ("host", "disk")] == [1 / 50, 1 / 10]
    assert [in_rates(uneven).of(tier) for tier in ("host", "disk")] == [1 / 100, 1 / 20]


def test_without_a_disk_its_copies_never_end() -> None:
    """So that no choice can use it by mistake."""
    assert Direction(out_rates(DEVICE)).run(1, "disk", 0.0) == float("inf")


def test_deadlines_go_back_from_the_last_need() -> None:
    """Each copy back leaves room for those that are needed after it, and for the host's cost of issuing it."""
    deadlines = Deadlines(in_rates(CPU), 0.25)
    assert deadlines.issue_by(100, "host", 10.0) == 8.75
    assert deadlines.issue_by(100, "host", 9.5) == 7.5
    assert deadlines.issue_by(100, "host", 5.0) == 3.75
    assert deadlines.issue_by(100, "disk", 9.0) == 3.75
    assert deadlines.issue_by(20, "disk", 9.0) == 2.5


def test_deadlines_know_that_disk_copies_take_the_link() -> None:
    """On a device with memory of its own a host copy must leave a second for the bytes from disk."""
    deadlines = Deadlines(in_rates(GPU), 0.0)
    assert deadlines.issue_by(100, "disk", 10.0) == 5.0
    assert deadlines.issue_by(100, "host", 10.0) == 8.0
    assert deadlines.issue_by(700, "host", 10.0) == 1.0
    assert deadlines.issue_by(20, "disk", 10.0) == pytest.approx(0.8)


def test_copies_back_wait_for_their_copy_out() -> None:
    """What is not on disk yet cannot be read from it; a second request for it is none."""
    lanes = Lanes(CPU)
    lanes.swap_out(7, 50, "disk", 0.0)
    lanes.swap_in(7, 50, "disk", 1.0)
    lanes.swap_in(7, 50, "disk", 30.0)
    assert (lanes.out_end, lanes.in_end) == ({7: 5.0}, {7: 7.5})


def test_a_read_that_waits_for_its_write_delays_no_host_copy() -> None:
    """The link is not kept while the disk is waited for."""
    lanes = Lanes(GPU)
    lanes.swap_out(7, 50, "disk", 0.0)
    lanes.swap_out(8, 50, "host", 0.0)
    lanes.swap_in(7, 50, "disk", 1.0)
    lanes.swap_in(8, 50, "host", 1.0)
    assert lanes.in_end == {7: 7.5, 8: 2.0}


def test_compute_stalls_until_what_it_waits_for() -> None:
    """Waits add up; what has ended costs nothing."""
    lanes = Lanes(DEVICE)
    assert lanes.wait(3.0, 1.0) == 3.0
    assert lanes.wait(2.0, 3.0) == 3.0
    assert lanes.stall_seconds == 2.0


def test_copies_cost_compute_what_their_bytes_cost_over_the_link() -> None:
    """However long the disk takes."""
    for tier in ("host", "disk"):
        lanes = Lanes(CPU)
        lanes.swap_out(7, 50, tier, 0.0)
        lanes.swap_in(7, 50, tier, 0.0)
        assert lanes.copy_seconds == 1.0
