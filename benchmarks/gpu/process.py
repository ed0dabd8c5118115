"""Runs one job in a fresh process and brings back what it returned, or why it did not.

A job names a function, `module:name`, which takes the device, `quick` and the job's arguments and returns
something ready for JSON. Its process has a process group of its own, which is ended as a whole: a job that hangs,
crashes or runs out of memory does no harm to its parent.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

_CHECKOUT = Path(__file__).resolve().parents[2]
_GRACE_SECONDS = 2.0
_MAX_MESSAGE = 300
_NUM_LOG_LINES = 60

State = Literal["done", "error", "stopped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a process is asked to do.

    Attributes:
        function: `module:name` of what it calls.
        device: Torch device to measure on.
        quick: Whether tiny sizes will do.
        arguments: Further keywords, ready for JSON.
        environment: Environment variables to set.
    """

    function: str
    device: str
    quick: bool = False
    arguments: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a job ended.

    Attributes:
        state: "done", "error", or "stopped" because its time was over.
        content: What the function returned, if it is done.
        message: Why it failed, in one line.
        log: The end of what it wrote.
        seconds: How long it took, the start of its process included.
    """

    state: State
    content: Any = None
    message: str = ""
    log: str = ""
    seconds: float = 0.0


def launch(job: Job, timeout_seconds: float) -> Ended:
    """Run a job and wait for it, no longer than `timeout_seconds`."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="benchmark-job-") as folder:
        output, log = Path(folder) / "output.json", Path(folder) / "log.txt"
        status = _run(job, output, log, timeout_seconds)
        seconds = time.perf_counter() - start
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        tail = "\n".join(lines[-_NUM_LOG_LINES:])
        if status is None:
            return Ended(state="stopped", message=f"stopped after {seconds:.0f} s", log=tail, seconds=seconds)
        if status != 0 or not output.exists():
            return Ended(state="error", message=_reason(lines, status), log=tail, seconds=seconds)
        return Ended(state="done", content=json.loads(output.read_text(encoding="utf-8")), log=tail, seconds=seconds)


def _run(job: Job, output: Path, log: Path, timeout_seconds: float) -> int | None:
    """Return the exit status, or None if the process was stopped."""
    command = [sys.executable, "-m", "benchmarks.gpu.child", json.dumps(asdict(job)), str(output)]
    environment = {**os.environ, **job.environment, "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command, cwd=_CHECKOUT, env=environment, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink,
            start_new_session=True,
        )  # fmt: skip
        try:
            return process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Leave nothing of a process group behind."""
    for wish in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            break
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, wish)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_SECONDS)
    process.wait()


def _reason(lines: list[str], status: int) -> str:
    """Return the last line that a traceback ends with, or how the process ended."""
    told = [line.strip() for line in lines if line.strip()]
    ending = f"signal {-status}" if status < 0 else f"status {status}"
    if not told:
        return f"ended with {ending} and said nothing"
    errors = [line for line in told if "Error" in line.split(":")[0] or "Exception" in line.split(":")[0]]
    return f"{(errors or told)[-1][:_MAX_MESSAGE]} ({ending})"
