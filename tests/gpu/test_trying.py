"""The GPU tests themselves run on a CPU, as far as they can, so that they are right when there is a GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.emulated_cuda.build import why_not
from tests.shares import is_all

CHECKOUT = Path(__file__).resolve().parents[2]
SOME = (
    "custom-function-in-place or half_precision and whole or another_thread or slow_streams and dropout "
    "or read_by_nobody and dropout or loop_can_repeat or as_predicted and lstm or used_again and gpt2"
)
"""At least one of each test that a CPU can run."""


@pytest.mark.skipif(not why_not() and not is_all(), reason="make test-emulated runs more of them, where it can")
def test_some_gpu_tests_pass_on_the_cpu() -> None:
    """One of each kind, told by the environment where to run."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu", "-k", SOME],
        cwd=CHECKOUT,
        env={**os.environ, "LIGHTNING_OFFLOAD_TEST_DEVICE": "cpu"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    summary = re.search(r"(\d+) passed", done.stdout)
    assert summary is not None
    assert int(summary[1]) >= 20, done.stdout[-2000:]
