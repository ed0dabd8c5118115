"""``bench-links``: what it measures, how it prints, and how it tells of bad input."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_offload import cli
from lightning_offload.capture.calibrate import LinkRates
from lightning_offload.cli import links
from lightning_offload.errors import SpillError
from lightning_offload.plugins import devices
from tests.cli.running import refused

RATES = LinkRates(
    d2h_bytes_per_second=50.0e9,
    h2d_bytes_per_second=25.5e9,
    both_d2h_bytes_per_second=40.0e9,
    both_h2d_bytes_per_second=20.0e9,
)


@dataclasses.dataclass
class Measuring:
    """Stands in for the measurement."""

    calls: list[tuple[torch.device, Path | None, int]] = dataclasses.field(default_factory=list)
    rates: LinkRates = RATES
    error: Exception | None = None

    def __call__(self, device: torch.device, spill_dir: Path | None = None, *, num_bytes: int) -> LinkRates:
        self.calls.append((device, spill_dir, num_bytes))
        if self.error is not None:
            raise self.error
        return self.rates


@pytest.fixture
def measuring(monkeypatch: pytest.MonkeyPatch) -> Measuring:
    """The measurement is replaced, and the machine is a CPU's with much memory."""
    fake = Measuring()
    monkeypatch.setattr(devices, "measure_rates", fake, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(links, "host_memory_bytes", lambda: 64 << 30)
    monkeypatch.setenv("COLUMNS", "100")
    return fake


def test_a_table_of_rates(measuring: Measuring, capsys: pytest.CaptureFixture[str]) -> None:
    """Each link has a row; what was not measured says so."""
    assert cli.run(["bench-links"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert measuring.calls == [(torch.device("cpu"), None, 256 << 20)]
    assert "Links of cpu, transfers of 256.0 MiB" in out
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if "│" in line]
    assert rows == [
        ["device to host", "50.0 GB/s"],
        ["host to device", "25.5 GB/s"],
        ["device to host, both at once", "40.0 GB/s"],
        ["host to device, both at once", "20.0 GB/s"],
        ["disk write", "not measured"],
        ["disk read", "not measured"],
    ]


def test_json(measuring: Measuring, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same figures for programs, in bytes per second; null for what was not measured."""
    measuring.rates = dataclasses.replace(RATES, disk_write_bytes_per_second=2e9)
    arguments = ["bench-links", "--device", "cpu", "--spill-dir", str(tmp_path), "--size", "8MB", "--json"]
    assert cli.run(arguments) == 0
    assert measuring.calls == [(torch.device("cpu"), tmp_path, 8_000_000)]
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found == {"device": "cpu", "num_bytes": 8_000_000, **dataclasses.asdict(measuring.rates)}
    assert found["disk_read_bytes_per_second"] is None


def test_cuda_is_measured_where_there_is_one(
    measuring: Measuring, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without --device the GPU is meant; the table has its name."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    assert cli.run(["bench-links"]) == 0
    assert "(NVIDIA H200)" in capsys.readouterr().out
    assert cli.run(["bench-links", "--device", "cuda:1"]) == 0
    first, second = (device for device, _, _ in measuring.calls)
    assert first.type == "cuda"
    assert second == torch.device("cuda", 1)
    capsys.readouterr()
    assert "'cuda:2' is not there" in refused(capsys, "bench-links", "--device", "cuda:2")


def test_bad_input(measuring: Measuring, capsys: pytest.CaptureFixture[str], subtests: pytest.Subtests) -> None:
    """One line says what is wrong and what is allowed, the exit code is 2, and nothing is measured."""
    for arguments, message in [
        (["--size", "12G"], "--size '12G' is ambiguous: write '12GiB'"),
        (["--size", "much"], "--size 'much' is not a number of bytes"),
        (["--size", "-1MiB"], "'-1MiB' is negative"),
        (["--size", "4096"], "--size '4096' measures latencies, not rates"),
        (["--size", "64GiB"], "--size '64GiB' is too large: this machine has 64.0 GiB of memory"),
        (["--size"], "'--size' requires an argument"),
        (["--device", "tpu"], "device 'tpu' is not known: use 'cpu' or 'cuda'"),
        (["--device", "meta"], "device 'meta' is not supported"),
        (["--device", "cuda"], "--device 'cuda' is not there"),
        (["--spill-dir", "/no/such/folder"], "--spill-dir '/no/such/folder' is no folder"),
        (["--spill-dir", __file__], "is no folder"),
        (["--spill-dir", 300 * "x"], "cannot be used: File name too long"),
        (["--sizes", "1MiB"], "No such option: --sizes"),
        (["cpu"], "unexpected extra argument"),
    ]:
        with subtests.test(arguments=arguments):
            assert message in refused(capsys, "bench-links", *arguments)
            assert measuring.calls == []


@pytest.mark.parametrize(
    "error",
    [
        SpillError("the disk is full"),
        RuntimeError("CUDA out of memory.\nTried to allocate"),
        MemoryError("no memory"),
    ],
)
def test_a_measurement_that_fails(error: Exception, measuring: Measuring, capsys: pytest.CaptureFixture[str]) -> None:
    """What the measurement complains about is told in one line as well."""
    measuring.error = error
    assert str(error).splitlines()[0] in refused(capsys, "bench-links")
