"""The example of several devices runs, learns, and stays within its budget."""

from __future__ import annotations

import re

from tests.distributed.launching import run
from tests.examples.figures import figures_in


def test_train_ddp() -> None:
    """As its docstring says, on two CPU processes."""
    output = run("-m", "examples.lightning.train_ddp", "--devices", 2, "--accelerator", "cpu", "--epochs", 4)
    assert float(re.findall(r"accuracy: ([0-9.]+)", output)[-1]) > 0.6
    figures = figures_in(output)
    assert figures["measured_peak_bytes"] <= figures["budget_bytes"] == 6 * 2**20 < figures["plain_peak_bytes"]
    assert figures["swapped_bytes"] + figures["recomputed_bytes"] > 0
