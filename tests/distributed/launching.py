"""Launches the processes of a distributed test, with a time-out, and leaves none behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
TIMEOUT_SECONDS = 120
GRACE_SECONDS = 20
_OF_ANOTHER_JOB = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "NODE_RANK", "LOCAL_RANK", "RANK")
"""Variables that Lightning leaves in the environment of a process in which it trained."""


def torchrun(script: Path, *args: object, num_processes: int = 2) -> str:
    """Runs a script under torchrun; returns what its processes print."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_processes}"]
    return run(*launcher, script, *args)


def run(*args: object) -> str:
    """Runs python with these arguments; fails with what was printed unless all goes well in time."""
    own = {name: value for name, value in os.environ.items() if name not in _OF_ANOTHER_JOB}
    process = subprocess.Popen(
        [sys.executable, *map(str, args)],
        cwd=ROOT,
        env={**own, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun ends its workers then, whose sessions are their own
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_SECONDS)
        _kill_all(process)
        output, _ = process.communicate()
        raise AssertionError(f"did not end within {TIMEOUT_SECONDS} s:\n{output}") from None
    finally:
        _kill_all(process)
    assert process.returncode == 0, output
    return output


def _kill_all(process: subprocess.Popen[str]) -> None:
    """Ends what the process started too: it leads a session of its own."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:  # all have ended
        return
