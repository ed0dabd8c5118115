"""``devices``: the catalogue, and what is in this machine."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from lightning_offload.capture import spec_cache
from lightning_offload.graph.catalog import device_spec, names
from tests.cli.running import json_of, output_of, rows_of
from tests.graph.building import DEVICE


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without GPUs, where nothing was measured yet."""
    monkeypatch.setenv("LIGHTNING_OFFLOAD_CACHE", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "180")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_the_catalogue(capsys: pytest.CaptureFixture[str]) -> None:
    """Each entry has a row with its figures; JSON has the same in bytes and seconds, with sources."""
    found = json_of(capsys, "devices")
    assert [entry["name"] for entry in found["catalog"]] == list(names())
    for entry in found["catalog"]:
        spec = device_spec(entry["name"])
        assert entry["memory_bytes"] == spec.memory_bytes
        assert entry["flops_per_second"]["float32"] == spec.flops_per_second
        assert entry["d2h_bytes_per_second"] == spec.d2h_bytes_per_second
        assert len(entry["sources"]) == 3
    rows = {row[0]: row for row in rows_of(output_of(capsys, "devices"))}
    assert rows["k40c"] == [
        "k40c", "Tesla K40c", "11.2", "288", "4.3", "4.3", "4.3", "10.1", "10.1"
    ]  # fmt: skip


def test_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    """The CPU, with links once they were measured."""
    (cpu,) = json_of(capsys, "devices")["here"]
    assert (cpu["device"], cpu["catalog_name"], cpu["d2h_bytes_per_second"]) == ("cpu", None, None)
    assert cpu["memory_bytes"] > 0
    assert rows_of(output_of(capsys, "devices"))[-1][-2:] == ["not measured", "not measured"]
    key = spec_cache.key_for(torch.device("cpu"))
    spec_cache.store(key, dataclasses.replace(DEVICE, kind="cpu", d2h_bytes_per_second=7e9))
    assert rows_of(output_of(capsys, "devices"))[-1][-2] == "7.0 GB/s"


def test_gpus_here(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs are found in the catalogue by their names."""

    class Properties:
        total_memory = 47 << 30

    titles = ["NVIDIA GeForce RTX 4090", "NVIDIA Something"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: titles[device.index])
    found = json_of(capsys, "devices")["here"][1:]
    assert [(gpu["device"], gpu["catalog_name"]) for gpu in found] == [("cuda:0", "4090"), ("cuda:1", None)]
    assert {gpu["memory_bytes"] for gpu in found} == {47 << 30}
