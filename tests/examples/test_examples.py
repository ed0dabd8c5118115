"""The examples run, learn, and stay within their budgets.

They run in this process, as those of `test_adapter_examples` do, but for one, which shows that a fresh one is as good.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.examples.figures import figures_in
from tests.examples.test_adapter_examples import Run
from tests.examples.test_adapter_examples import run as run
from tests.one_thread import one_thread as one_thread

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's advice to whoever runs a script

ROOT = Path(__file__).parents[2]
CONFIG = "examples/lightning/config.yaml"


@pytest.mark.parametrize("module", ["examples.pytorch.train", "examples.lightning.train"])
def test_training_script(run: Run, module: str) -> None:
    """The scripts learn the digits within the budget that they are given."""
    output = run(module, "--epochs", "3")
    accuracy = float(re.findall(r"accuracy: ([0-9.]+)", output)[-1])
    assert accuracy > 0.9
    figures = figures_in(output)
    assert figures["measured_peak_bytes"] <= figures["budget_bytes"] == 8 * 2**20
    assert figures["budget_bytes"] < figures["plain_peak_bytes"]
    assert figures["swapped_bytes"] + figures["recomputed_bytes"] > 0


def test_language_model(run: Run) -> None:
    """The loss in chunks learns within a budget that it has no plan for with all logits at once."""
    output = run("examples.pytorch.language", "--steps", "6")
    losses = [float(value) for value in re.findall(r"loss ([0-9.]+)", output)]
    assert losses[-1] < losses[0] - 0.5
    figures = figures_in(output)
    assert figures["measured_peak_bytes"] <= figures["budget_bytes"] == 160 * 2**20


def test_cli_from_a_file() -> None:
    """LightningCLI trains from the configuration file, and prints the plan; all in a fresh process."""
    done = subprocess.run(
        [sys.executable, "-m", "examples.lightning.cli", "fit", "--config", CONFIG, "--trainer.max_epochs=1"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    output = done.stdout + done.stderr
    assert "Offload plan" in output
    assert "8MiB" in output


def test_cli_help(run: Run, capfd: pytest.CaptureFixture[str]) -> None:
    """The help that the docstring names lists the keywords."""
    with pytest.raises(SystemExit) as ended:
        run("examples.lightning.cli", "fit", "--trainer.strategy.help=lightning_offload.OffloadStrategy")
    assert not ended.value.code
    assert "--trainer.strategy.budget" in capfd.readouterr().out
