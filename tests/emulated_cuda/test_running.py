"""What `make test-emulated` does where the device is not, and what the plugin does to a test that leaves races."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.emulated_cuda.__main__ import ALL, SHARE
from tests.gpu.device import IS_EMULATED

PLUGINS = ("-p", "no:cacheprovider", "-p", "tests.emulated_cuda.plugin")
CHECKOUT = Path(__file__).resolve().parents[2]


def test_without_a_compiler_one_line_says_so() -> None:
    """And nothing fails."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("EMULATED_CUDA")}
    done = subprocess.run(
        [sys.executable, "-m", "tests.emulated_cuda"],
        cwd=CHECKOUT,
        env={**environment, "CXX": "no-such-compiler"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1
    assert done.stdout.startswith("emulated device: skipped, ")


def test_several_schedules_and_two_devices_are_run() -> None:
    """By the share as well as by all."""
    for runs in (SHARE, ALL):
        assert len({tuple(run.schedule.items()) for run in runs}) >= 3
        assert {run.schedule["EMULATED_CUDA_MODE"] for run in runs} >= {"lazy", "threads"}
        assert any(run.schedule.get("EMULATED_CUDA_DEVICES") == "2" for run in runs)


RACY = """
import torch

def test_races():
    a, side = torch.ones(100, device="cuda"), torch.cuda.Stream()
    with torch.cuda.stream(side):
        b = a * 2

def test_waits():
    a, side = torch.ones(100, device="cuda"), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        b = a * 2
    torch.cuda.synchronize()
"""


@pytest.mark.skipif(not IS_EMULATED, reason="needs the emulated device: make test-emulated")
def test_a_test_that_leaves_races_fails(tmp_path: Path) -> None:
    """With the races in its message; the others pass."""
    (tmp_path / "test_racy.py").write_text(RACY)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *PLUGINS, str(tmp_path)],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "2 passed, 1 error" in done.stdout, done.stdout
    assert "are not ordered" in done.stdout
    assert "ERROR" in done.stdout.split("short test summary")[1]
    assert "test_races" in done.stdout.split("short test summary")[1]
