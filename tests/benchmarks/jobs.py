"""Jobs for the tests of the GPU suite's machinery: functions that a fresh process calls."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import Any

import torch

from benchmarks.results import Measurements, Row


def measured(device: torch.device, *, quick: bool, value: float) -> Measurements:
    return Measurements(
        rows=[Row(case=f"on {device.type}, quick {quick}", metric="ratio", value=value)],
        config={"variable": os.environ.get("BENCHMARK_TEST", "unset")},
        repeats=3,
    )


def raises(device: torch.device, *, quick: bool) -> None:
    sys.stdout.write("some chatter\n")
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB")


def crashes(device: torch.device, *, quick: bool) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hangs(device: torch.device, *, quick: bool, path: str) -> None:
    """Sleep, with a child of its own whose process id is written to `path`."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with open(path, "w", encoding="utf-8") as file:
        file.write(str(child.pid))
    time.sleep(600)


def trial(device: torch.device, *, quick: bool, batch_size: int) -> dict[str, Any]:
    return {"fits": batch_size <= 37, "need_bytes": 100 + 10 * batch_size, "figures": {"peak_bytes": 10 * batch_size}}
