"""The adapters under DDP, in two gloo processes, and a tuner whose ranks do not have the same memory."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_data_parallel(tmp_path: Path) -> None:
    """Accumulated gradients under two policies, and a tuned run with an OOM on one rank: equal to plain DDP."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(2):
        environment = {
            **os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "RANK": str(rank), "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            "ACCELERATE_USE_CPU": "true", "TORCHELASTIC_RUN_ID": "test", "GROUP_RANK": "0",
        }  # fmt: skip
        command = [sys.executable, "-W", "ignore", "-m", "tests.adapters.data_parallel"]
        children.append(
            subprocess.Popen(
                command, cwd=tmp_path, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
        )
    try:
        outputs = [child.communicate(timeout=120) for child in children]
    finally:
        for child in children:
            child.kill()
            child.wait()
    for child, (output, error) in zip(children, outputs, strict=True):
        assert child.returncode == 0, error
        assert output.split() == ["fabric", "accelerate", "transformers", "tuner", "errors"]
