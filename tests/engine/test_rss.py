"""What is swapped to disk leaves the process, as seen from outside."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.engine.rss_child import ACTIVATION_MIB, BUDGET_BYTES, DEPTH

SAVED_BYTES = 2 * DEPTH * ACTIVATION_MIB << 20
NEEDED_BYTES = 3 * SAVED_BYTES
SAMPLE_SECONDS = 0.002

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "LIGHTNING_OFFLOAD_CACHE": "",
    "MALLOC_MMAP_THRESHOLD_": str(1 << 20),  # glibc gives freed tensors back to the system
    "MALLOC_TRIM_THRESHOLD_": str(1 << 20),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A process that ended well: the most memory that it had at once, and what it printed."""

    peak_bytes: int
    printed: dict[str, Any]


def watched(*arguments: str) -> Run:
    """Run the child and watch its resident memory until it ends."""
    command = [sys.executable, "-m", "tests.engine.rss_child", *arguments]
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        command, cwd=root, env={**os.environ, **ENVIRONMENT}, stdout=subprocess.PIPE, text=True
    ) as child:
        process = psutil.Process(child.pid)
        peak = 0
        while child.poll() is None:
            peak = max(peak, _resident_bytes(process))
            time.sleep(SAMPLE_SECONDS)
        assert child.stdout is not None
        text = child.stdout.read()
    assert child.returncode == 0
    return Run(peak_bytes=peak, printed=json.loads(text))


def _resident_bytes(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.Error:  # it ended just now
        return 0


@pytest.mark.skipif(
    psutil.virtual_memory().available < NEEDED_BYTES, reason="needs three times its activations of free memory"
)
@pytest.mark.skipif(psutil.disk_usage("/tmp").free < NEEDED_BYTES, reason="needs as much of free disk space")
def test_resident_memory_falls_by_what_is_swapped(tmp_path: Path) -> None:
    """At the smallest feasible budget the peak falls by at least 80% of the swapped bytes; gradients are the same."""
    plain = watched("plain")
    disk = watched("disk", str(tmp_path))
    assert disk.printed["digest"] == plain.printed["digest"]
    assert disk.printed["phase"] == "planned"
    assert disk.printed["floor_bytes"] + (2 << 20) >= BUDGET_BYTES, "the budget is the smallest feasible one"
    swapped = disk.printed["swapped_bytes"]
    assert swapped >= 0.9 * SAVED_BYTES
    fallen = plain.peak_bytes - disk.peak_bytes
    assert fallen >= 0.8 * swapped, f"{plain.peak_bytes=} {disk.peak_bytes=} {swapped=}"
    assert list(tmp_path.iterdir()) == []
