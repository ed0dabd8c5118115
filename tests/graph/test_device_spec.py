"""Device specs: exact round trips, and refusals of rates that make no sense."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_offload.errors import PlanError
from lightning_offload.graph import DeviceSpec
from tests.graph.building import DEVICE

RATES = st.floats(min_value=1e-3, max_value=1e15)


@given(
    st.builds(
        DeviceSpec,
        name=st.text(),
        kind=st.sampled_from(["cpu", "cuda"]),
        memory_bytes=st.none() | st.integers(0, 1 << 60),
        d2h_bytes_per_second=RATES,
        h2d_bytes_per_second=RATES,
        copy_interference=st.floats(0, 1),
        overhead_seconds=st.floats(0, 1),
    )
)
def test_round_trip_is_exact(device: DeviceSpec) -> None:
    """A device read from its own JSON equals it, to the last bit of its rates."""
    assert DeviceSpec.from_json(device.to_json()) == device


@pytest.mark.parametrize(
    ("field", "item"),
    [
        ("d2h_bytes_per_second", 0.0),
        ("h2d_bytes_per_second", -1.0),
        ("h2d_bytes_per_second", float("nan")),
        ("h2d_bytes_per_second", 10**400),
        ("copy_interference", 1.5),
        ("copy_interference", -0.1),
        ("copy_interference", float("nan")),
        ("overhead_seconds", -1e-6),
        ("memory_bytes", "80GB"),
        ("memory_bytes", 1.5),
        ("memory_bytes", -1),
        ("name", None),
        ("kind", 3),
        ("schema", 0),
        ("lightning_offload", "step_graph"),
        ("colour", "red"),
    ],
    ids=lambda item: str(item)[:24],
)
def test_corrupt_device_is_a_plan_error(field: str, item: Any) -> None:
    """Wrong types, unknown fields and impossible rates are refused."""
    data = json.loads(DEVICE.to_json())
    data[field] = item
    with pytest.raises(PlanError):
        DeviceSpec.from_json(json.dumps(data))


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(DeviceSpec)])
def test_missing_field_is_a_plan_error(field: str) -> None:
    """No field has a default that could hide its absence."""
    data = json.loads(DEVICE.to_json())
    del data[field]
    with pytest.raises(PlanError, match=field):
        DeviceSpec.from_json(json.dumps(data))


def test_whole_number_is_a_rate() -> None:
    """A file written by hand may say 100 for 100.0."""
    data = json.loads(DEVICE.to_json())
    data["d2h_bytes_per_second"] = 100
    assert DeviceSpec.from_json(json.dumps(data)) == DEVICE
