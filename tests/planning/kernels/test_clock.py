"""Copies on flat lanes against :mod:`lightning_offload.planning.links`, which has exact tests of its own."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lightning_offload.graph import DeviceSpec
from lightning_offload.planning.kernels.clock import first_from, run_copy
from lightning_offload.planning.kernels.prefetches import issue_by
from lightning_offload.planning.links import in_rates
from tests.graph.building import tiered_devices
from tests.planning.reference_lanes import Deadlines, Direction

COPIES = st.lists(
    st.tuples(st.sampled_from(["host", "disk"]), st.integers(1, 100), st.floats(0, 50), st.floats(0, 50)), max_size=8
)


@given(device=tiered_devices(), copies=COPIES)
def test_copies_end_as_on_the_lanes(device: DeviceSpec, copies: list[tuple[str, int, float, float]]) -> None:
    """For any mix of tiers, sizes and times, on devices with and without a disk or memory of their own."""
    rates, lane, lanes = in_rates(device), Direction(in_rates(device)), [0.0, 0.0]
    flat = (rates.link, rates.disk, rates.link_under_disk)
    for tier, num_bytes, now, after in copies:
        ends = run_copy(lanes, flat, int(tier == "disk"), num_bytes, now, after)
        assert ends == lane.run(num_bytes, tier, now, after)  # type: ignore[arg-type]


@given(device=tiered_devices(), copies=COPIES)
def test_deadlines_are_those_of_the_lanes(device: DeviceSpec, copies: list[tuple[str, int, float, float]]) -> None:
    """From the last need to the first."""
    rates, expected, deadlines = in_rates(device), Deadlines(in_rates(device), 0.25), [float("inf")] * 2
    flat = (rates.link, rates.disk, rates.link_under_disk)
    for tier, num_bytes, need, _ in sorted(copies, key=lambda copy: -copy[2]):
        by = issue_by(deadlines, flat, 0.25, int(tier == "disk"), num_bytes, need)
        assert by == expected.issue_by(num_bytes, tier, need)  # type: ignore[arg-type]


def test_first_tick_from_a_time() -> None:
    """Ticks that begin at that very time count, the first of equals; past the end there is one more."""
    starts = [0.0, 1.0, 1.0, 2.5]
    assert [first_from(starts, x) for x in (-1.0, 0.0, 0.5, 1.0, 2.6, float("inf"))] == [0, 0, 1, 1, 4, 4]
