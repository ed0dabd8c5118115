"""Running out of memory under a plan: the step is repeated under a tighter one, or the error has the figures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.gpu.device import DEVICE, IS_CUDA, MARKS, TOLERANT

pytestmark = [*MARKS, TOLERANT]

UNDER_A_PLAN = ("measuring", "planned")  # a plan that was corrected late is measured once more
CHECKOUT = Path(__file__).resolve().parents[2]


def train(kind: str) -> dict[str, Any]:
    """Train in a process of its own, since what caps memory caps it for good."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.running_out", kind, str(DEVICE)],
        cwd=CHECKOUT,
        env={**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_a_step_given_as_a_function_is_repeated() -> None:
    """The run goes on as if nothing had happened, bit for bit, under a plan."""
    found = train("run")
    assert found["num_run_out"], "the cap was not met: the test tests nothing"
    assert found["is_same"], found
    assert found["phase"] in UNDER_A_PLAN, found


def test_a_loop_can_repeat_the_step_itself() -> None:
    """The error tells plan and device apart in figures, the model is as it was, and the next try fits."""
    found = train("step")
    assert found["messages"], "the cap was not met: the test tests nothing"
    for message in found["messages"]:
        assert "lightning-offload:" in message
        assert "lower the budget or the batch size" in message
        assert not IS_CUDA or "predicted peak" in message
    assert found["is_intact"]
    assert found["is_same"], found
    assert found["phase"] in UNDER_A_PLAN, found
