"""A job in a fresh process: what it returns comes back, and whatever else happens does no harm."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.process import Ended, Job, launch


def job(name: str, **arguments: Any) -> Job:
    return Job(function=f"tests.benchmarks.jobs:{name}", device="cpu", arguments=arguments)


def test_what_a_job_returns_comes_back():
    """Rows are brought back as JSON; device, arguments and environment reach the job."""
    wanted = Job(
        function="tests.benchmarks.jobs:measured", device="cpu", quick=True, arguments={"value": 1.5},
        environment={"BENCHMARK_TEST": "set"},
    )  # fmt: skip
    ended = launch(wanted, 120)
    assert ended.state == "done", ended
    assert ended.content["rows"] == [{"case": "on cpu, quick True", "metric": "ratio", "value": 1.5, "goal": None}]
    assert ended.content["config"] == {"variable": "set"}
    assert ended.seconds > 0


def test_an_exception_and_a_crash_are_told_in_one_line():
    """The traceback's last line, or the signal of a process that dies without a word; the log holds the rest."""
    ended = launch(job("raises"), 120)
    assert ended.state == "error"
    assert "CUDA out of memory. Tried to allocate 3 GiB (status 1)" in ended.message
    assert "\n" not in ended.message
    assert "some chatter" in ended.log
    assert "Traceback" in ended.log
    ended = launch(job("crashes"), 120)
    assert (ended.state, ended.message) == ("error", "ended with signal 9 and said nothing")


def test_a_job_that_hangs_is_stopped_with_all_it_started(tmp_path: Path):
    """When its time is over neither the process nor its children go on."""
    path = tmp_path / "pid"
    ended = _launch_until(path, seconds=120)
    assert ended.state == "stopped"
    assert _is_gone(int(path.read_text()))


def _launch_until(path: Path, *, seconds: float) -> Ended:
    """Stop the job soon after it has written its child's id: how long a start takes is the machine's business."""
    timeout = 4.0
    while True:
        ended = launch(job("hangs", path=str(path)), timeout)
        if path.exists() or timeout > seconds:
            return ended
        timeout *= 2


def _is_gone(pid: int) -> bool:
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            if "State:\tZ" in Path(f"/proc/{pid}/status").read_text():
                return True
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.02)
    return False


@pytest.mark.gpu
def test_cuda_without_a_number_is_the_current_device():
    """A job for "cuda" gets a device that all of torch takes, to cap its memory, say."""
    arguments = {"model": "resnet50", "cap_bytes": 1 << 30, "is_managed": False, "batch_size": 2}
    ended = launch(Job(function="benchmarks.gpu.max_batch:trial", device="cuda", quick=True, arguments=arguments), 240)
    assert ended.state == "done", ended
    assert ended.content["fits"]
