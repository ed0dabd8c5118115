"""The examples for other frameworks and for the tuner run, learn, and stay within their budgets.

They run in this process, which has imported these frameworks anyhow; a fresh one for each would cost more than they do.
"""

from __future__ import annotations

import re
import runpy
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.adapters.conftest import no_accelerator_state as no_accelerator_state
from tests.examples.figures import figures_in
from tests.one_thread import one_thread as one_thread

pytestmark = pytest.mark.filterwarnings("ignore")  # the frameworks' advice to whoever runs a script

Run = Callable[..., str]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """Runs an example as its docstring says and returns what it prints."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def run(module: str, *args: str) -> str:
        monkeypatch.setattr("sys.argv", [module, *args])
        runpy.run_module(module, run_name="__main__")
        captured = capfd.readouterr()
        return captured.out + captured.err

    return run


@pytest.mark.parametrize("module", ["examples.accelerate.train", "examples.fabric.train"])
def test_digits(run: Run, module: str) -> None:
    """The scripts learn the digits within the budget that they are given."""
    output = run(module, "--epochs", "3")
    assert float(re.findall(r"accuracy: ([0-9.]+)", output)[-1]) > 0.9
    figures = figures_in(output)
    assert figures["measured_peak_bytes"] <= figures["budget_bytes"] == 8 * 2**20 < figures["plain_peak_bytes"]
    assert figures["swapped_bytes"] + figures["recomputed_bytes"] > 0


def test_text(run: Run) -> None:
    """The Trainer learns the text within its budget."""
    output = run("examples.transformers.train", "--epochs", "1")
    losses = [float(loss) for loss in re.findall(r"'loss': '?([0-9.]+)", output)]
    assert losses[-1] < 0.9 * losses[0]
    figures = figures_in(output)
    assert figures["measured_peak_bytes"] <= figures["budget_bytes"] == 64 * 2**20 < figures["plain_peak_bytes"]


def test_lightning_tuner(run: Run) -> None:
    """The finder shows its trials before the training, and training goes on with the size that it chose."""
    output = run("examples.lightning.tune", "--budget", "64MiB", "--max-batch-size", "64", "--epochs", "1")
    assert output.count("Trials of batch sizes") == 1
    size = int(re.findall(r"Batch size (\d+)", output)[-1])
    assert 1 <= size <= 64


@pytest.mark.parametrize("module", [("examples.pytorch.tune",), ("examples.accelerate.train", "--tune")])
def test_tuner(run: Run, module: tuple[str, ...]) -> None:
    """The size is found among those that were tried, and trained with, whatever other tests left in this process."""
    output = run(*module, "--epochs", "1", "--budget", "64MiB")
    size = int(re.findall(r"batch size: (\d+)", output)[-1])
    assert 1 <= size <= 128
    assert len(re.findall("epoch 0: loss", output)) >= 1
