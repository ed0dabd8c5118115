"""A device is measured through its lanes."""

from __future__ import annotations

import torch

from lightning_offload.capture.calibrate import device_memory_bytes, device_name, measure_device
from lightning_offload.graph import DeviceSpec

CPU = torch.device("cpu")


def test_measured_device_is_a_device_spec() -> None:
    """Each direction is tried once to warm up and three times to measure, on a block of the size asked for."""
    sizes: dict[str, list[int]] = {"out": [], "in": []}

    def swap_out(storage: torch.UntypedStorage) -> None:
        sizes["out"].append(storage.nbytes())

    def swap_in(storage: torch.UntypedStorage) -> None:
        sizes["in"].append(storage.nbytes())

    device = measure_device(CPU, swap_out, swap_in, num_bytes=4096)
    assert sizes == {"out": [4096] * 4, "in": [4096] * 4}
    assert device.d2h_bytes_per_second > 0
    assert device.h2d_bytes_per_second > 0
    assert DeviceSpec.from_json(device.to_json()) == device


def test_cpu_has_no_memory_of_its_own() -> None:
    """A CPU's memory is the host's, so it has no limit here."""
    assert device_memory_bytes(CPU) is None
    assert device_name(CPU) == "cpu"
