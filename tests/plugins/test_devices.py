"""Which devices there may be, and how their links are measured where memory is short."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from lightning_offload.capture import spec_cache
from lightning_offload.capture.calibrate import measure_device
from lightning_offload.errors import UnsupportedError
from lightning_offload.graph.device_spec import DeviceSpec
from lightning_offload.plugins import devices
from lightning_offload.plugins.devices import find_device, measure_spec, nominal_spec, supported
from lightning_offload.plugins.hardware import Hardware
from lightning_offload.plugins.settings import check_settings
from lightning_offload.runtime.spill import DiskPool
from lightning_offload.runtime.tiers import Tiers, tiers_for

CPU, MIB = torch.device("cpu"), 1 << 20


@pytest.mark.parametrize("name", ["xpu", "mps", "meta", "xpu:1"])
def test_other_kinds_of_devices_are_refused(name: str) -> None:
    """The error names the device and what may be used."""
    for device in (name, torch.device(name)):
        with pytest.raises(UnsupportedError, match=f"^device '{name}' is not supported: use 'cpu' or 'cuda'$"):
            supported(device)
    with pytest.raises(UnsupportedError, match=r"^device 'tpu' is not known: use 'cpu' or 'cuda'$"):
        supported("tpu")


def test_the_device_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its module's, else its inputs', else the accelerator that is in use, else the CPU."""
    module, batch = torch.nn.Linear(2, 2, device="meta"), torch.ones(2)
    assert find_device(module, batch) == torch.device("meta")
    assert find_device(torch.nn.Tanh(), batch) == CPU
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert find_device(None, 1) == CPU
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert find_device(None, 1) == torch.device("cuda", 3)


# ---- links of a device that is nearly full


@pytest.fixture
def stored(monkeypatch: pytest.MonkeyPatch) -> list[DeviceSpec]:
    """What is remembered of the machine."""
    found: list[DeviceSpec] = []
    monkeypatch.setenv("LIGHTNING_OFFLOAD_CACHE", "")  # nothing yet
    monkeypatch.setattr(spec_cache, "store", lambda key, spec: found.append(spec))
    return found


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], list[tuple[int, int]]]]:
    """Lets a device have no more than so many bytes at once; tells with what blocks it was tried."""
    asked: list[tuple[int, int]] = []

    def let_have(most_bytes: int) -> list[tuple[int, int]]:
        def measure(*args: Any, num_bytes: int, disk_bytes: int, **keywords: Any) -> DeviceSpec:
            asked.append((num_bytes // MIB, disk_bytes // MIB))
            if num_bytes > most_bytes:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return measure_device(*args, num_bytes=num_bytes, disk_bytes=disk_bytes, **keywords)

        monkeypatch.setattr(devices, "measure_device", measure)
        return asked

    return let_have


@pytest.fixture
def tiers(tmp_path: Any) -> Iterator[Tiers]:
    """With a disk."""
    made = tiers_for(CPU, disk=DiskPool(tmp_path))
    yield made
    made.close()


def test_usual_blocks_are_remembered(full: Any, stored: list[DeviceSpec], tiers: Tiers) -> None:
    """Links that were measured with blocks of the usual size need not be measured again on this machine."""
    asked = full(32 * MIB)
    spec = measure_spec(CPU, tiers, with_disk=True)
    assert (asked, stored) == ([(32, 32)], [spec])


def test_what_is_not_measured_is_not_remembered(monkeypatch: pytest.MonkeyPatch, tiers: Tiers) -> None:
    """A device that an earlier version measured counts the present one's host time of a copy."""
    spec = nominal_spec(CPU)
    earlier = dataclasses.replace(spec, overhead_seconds=1.0)
    monkeypatch.setattr(spec_cache, "load", lambda key: earlier)
    assert measure_spec(CPU, tiers, with_disk=False) == spec


@pytest.mark.parametrize(("most", "asked"), [(8, [(32, 32), (8, 8)]), (2, [(32, 32), (8, 8), (2, 2)])])
def test_smaller_blocks_where_memory_is_short(
    most: int, asked: list[tuple[int, int]], full: Any, stored: list[DeviceSpec], tiers: Tiers
) -> None:
    """The disk is measured by no more; what small blocks show is not remembered, since larger ones are faster."""
    found = full(most * MIB)
    spec = measure_spec(CPU, tiers, with_disk=True)
    assert (found, stored) == (asked, [])
    assert spec.has_disk


def test_no_memory_to_measure_with(full: Any, stored: list[DeviceSpec]) -> None:
    """Planning goes on with a nominal rate, which plans avoid; the measurement itself says what there was not."""
    asked = full(0)
    found = Hardware(CPU, check_settings(
        budget=None, policy="auto", tier="host", host_budget="1GiB", spill_dir=None, plan=None, keep=(), enabled=True,
        verify="first",
    ))  # fmt: skip
    assert found.planning_spec(MIB).d2h_bytes_per_second == 0.8 * nominal_spec(CPU).d2h_bytes_per_second
    assert ([num_bytes for num_bytes, _ in asked], stored) == ([32, 8, 2], [])
    with pytest.raises(torch.OutOfMemoryError):
        measure_spec(CPU, found.tiers, with_disk=False)
    found.tiers.close()
