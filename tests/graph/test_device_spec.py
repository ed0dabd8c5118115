"""Device specs: exact round trips, and refusals of rates that make no sense."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_offload.errors import PlanError
from lightning_offload.graph import DeviceSpec
from lightning_offload.graph.work_kinds import WorkKind
from tests.graph.building import DEVICE

RATES = st.floats(min_value=1e-3, max_value=1e15)
LIMITS = st.none() | st.integers(0, 1 << 60)
WITH_DISK = dataclasses.replace(
    DEVICE, host_memory_bytes=7, disk_write_bytes_per_second=30.0, disk_read_bytes_per_second=40.0
)
LATER = {
    "host_memory_bytes",
    "disk_write_bytes_per_second",
    "disk_read_bytes_per_second",
    "compute_capability",
}
"""Fields that files written before there were tiers, or rules for kernels, do not have."""

SHARES = {
    "convolution_efficiency", "depthwise_efficiency", "matmul_efficiency", "attention_efficiency",
    "recurrent_efficiency", "reduction_bandwidth", "elementwise_bandwidth",
}  # fmt: skip
HOST_COSTS = {"launch_seconds", "replay_overhead_seconds", "seeing_seconds", "handover_bytes", "handover_seconds"}
ADDED = LATER | SHARES | HOST_COSTS
"""Fields that files written before devices were calibrated do not have."""

CALIBRATED = dataclasses.replace(
    DEVICE, flops_per_second=1e3, memory_bytes_per_second=1e2, launch_seconds=2.0, convolution_efficiency=0.5,
    depthwise_efficiency=0.1, matmul_efficiency=0.25, attention_efficiency=0.2, recurrent_efficiency=2.0,
    reduction_bandwidth=0.25, elementwise_bandwidth=0.5,
)  # fmt: skip


def _with_disk(device: DeviceSpec, limit: int | None, disk: tuple[float, float] | None) -> DeviceSpec:
    write, read = disk or (0.0, 0.0)
    return dataclasses.replace(
        device, host_memory_bytes=limit, disk_write_bytes_per_second=write, disk_read_bytes_per_second=read
    )


DEVICES = st.builds(
    _with_disk,
    st.builds(
        DeviceSpec,
        name=st.text(),
        kind=st.sampled_from(["cpu", "cuda"]),
        memory_bytes=st.none() | st.integers(1, 1 << 60),
        d2h_bytes_per_second=RATES,
        h2d_bytes_per_second=RATES,
        copy_interference=st.floats(0, 1),
        overhead_seconds=st.floats(0, 1),
    ),
    LIMITS,
    st.none() | st.tuples(RATES, RATES),
)


@given(DEVICES)
def test_round_trip_is_exact(device: DeviceSpec) -> None:
    """A device read from its own JSON equals it, to the last bit of its rates."""
    assert DeviceSpec.from_json(device.to_json()) == device


CORRUPT = [
    ("d2h_bytes_per_second", 0.0), ("h2d_bytes_per_second", -1.0), ("h2d_bytes_per_second", float("nan")),
    ("h2d_bytes_per_second", 10**400), ("copy_interference", 1.5), ("copy_interference", -0.1),
    ("copy_interference", float("nan")), ("overhead_seconds", -1e-6), ("memory_bytes", "80GB"), ("memory_bytes", 1.5),
    ("memory_bytes", -1), ("host_memory_bytes", -1), ("host_memory_bytes", 1.5), ("host_memory_bytes", "12GiB"),
    ("disk_write_bytes_per_second", -1.0), ("disk_write_bytes_per_second", 0.0), ("disk_read_bytes_per_second", 0.0),
    ("disk_read_bytes_per_second", float("inf")), ("disk_read_bytes_per_second", None), ("name", None), ("kind", 3),
    ("schema", 0), ("lightning_offload", "step_graph"), ("colour", "red"), ("launch_seconds", -1e-6),
    ("replay_overhead_seconds", -1e-6), ("seeing_seconds", -1e-6), ("handover_bytes", -1), ("handover_bytes", 1.5),
    ("handover_seconds", -1e-6), ("convolution_efficiency", 0.0), ("matmul_efficiency", -1.0),
    ("reduction_bandwidth", 0.0), ("elementwise_bandwidth", None),
]  # fmt: skip
"""Values of fields: wrong types, unknown fields and impossible rates, a disk with one direction among them."""


def test_corrupt_device_is_a_plan_error(subtests: pytest.Subtests) -> None:
    """So is a field that is missing: none that was there from the start has a default that could hide its absence."""
    for field, item in CORRUPT:
        data = json.loads(WITH_DISK.to_json())
        data[field] = item
        with subtests.test(field=field, item=str(item)[:24]), pytest.raises(PlanError):
            DeviceSpec.from_json(json.dumps(data))
    for field in {field.name for field in dataclasses.fields(DeviceSpec)} - ADDED:
        data = json.loads(DEVICE.to_json())
        del data[field]
        with subtests.test(missing=field), pytest.raises(PlanError, match=field):
            DeviceSpec.from_json(json.dumps(data))


def test_whole_number_is_a_rate() -> None:
    """A file written by hand may say 100 for 100.0."""
    data = json.loads(DEVICE.to_json())
    data["d2h_bytes_per_second"] = 100
    assert DeviceSpec.from_json(json.dumps(data)) == DEVICE


def test_file_from_before_there_were_tiers_is_read() -> None:
    """What it does not say is that there is no limit and no disk."""
    data = json.loads(DEVICE.to_json())
    assert set(data) >= ADDED
    for field in ADDED:
        del data[field]
    device = DeviceSpec.from_json(json.dumps(data))
    assert device == DEVICE
    assert (device.host_memory_bytes, device.has_disk) == (None, False)


def test_calibrated_device_survives_json() -> None:
    """Its shares are among what a file says."""
    assert DeviceSpec.from_json(CALIBRATED.to_json()) == CALIBRATED


def test_work_takes_a_launch_and_the_longer_of_arithmetic_and_traffic() -> None:
    """Each at the share of the peak that the kind of work reaches; a view launches nothing."""
    shares = {
        WorkKind.CONVOLUTION: (2, 2), WorkKind.DEPTHWISE: (10, 2), WorkKind.MATMUL: (4, 2), WorkKind.ATTENTION: (5, 2),
        WorkKind.RECURRENT: (0.5, 2), WorkKind.REDUCTION: (1, 4), WorkKind.ELEMENTWISE: (1, 2),
    }  # fmt: skip
    assert set(shares) == set(WorkKind)
    for kind, (by_arithmetic, by_memory) in shares.items():
        assert CALIBRATED.work_seconds(kind, 1e6, 1) == 2 + 1e3 * by_arithmetic, kind
        assert CALIBRATED.work_seconds(kind, 1, 10**6) == 2 + 1e4 * by_memory, kind
    assert CALIBRATED.work_seconds(WorkKind.ELEMENTWISE, 0.0, 0) == 0


def test_at_peak_is_the_roofline() -> None:
    """Without shares and launches an op takes what its arithmetic or its traffic takes at the peaks, to the bit."""
    peak = CALIBRATED.at_peak()
    assert peak != CALIBRATED
    assert peak == dataclasses.replace(DEVICE, flops_per_second=1e3, memory_bytes_per_second=1e2)
    for kind in WorkKind:
        for flops, num_bytes in ((7e6, 3), (7.0, 10**9)):
            assert peak.work_seconds(kind, flops, num_bytes) == max(flops / 1e3, num_bytes / 1e2), kind


def test_derated_scales_every_link() -> None:
    """All four rates of links and disk, nothing else; what is 0 stays 0."""
    half = WITH_DISK.derated(0.5)
    assert (half.d2h_bytes_per_second, half.h2d_bytes_per_second) == (50.0, 50.0)
    assert (half.disk_write_bytes_per_second, half.disk_read_bytes_per_second) == (15.0, 20.0)
    links = [f.name for f in dataclasses.fields(DeviceSpec) if f.name.startswith(("d2h", "h2d", "disk"))]
    assert dataclasses.replace(half, **{name: getattr(WITH_DISK, name) for name in links}) == WITH_DISK
    assert not DEVICE.derated(0.5).has_disk


@given(DEVICES)
def test_derated_by_one_is_the_device(device: DeviceSpec) -> None:
    """The whole of a rate is that rate, to the last bit."""
    assert device.derated(1.0) == device


def test_derating_takes_a_fraction(subtests: pytest.Subtests) -> None:
    """A rate can be made neither zero, negative nor faster than it was measured."""
    for fraction in (0.0, -0.5, 1.5, float("nan")):
        with subtests.test(fraction=fraction), pytest.raises(PlanError, match="fraction"):
            DEVICE.derated(fraction)
