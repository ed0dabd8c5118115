"""The examples for other frameworks and for the tuner run, learn, and stay within their budgets."""

from __future__ import annotations

import re

import pytest

from tests.examples.test_examples import run


def figures_in(output: str) -> dict[str, int]:
    return {name: int(value) for name, value in re.findall(r"(\w+_bytes)=(\d+)", output)}


@pytest.mark.parametrize("module", ["examples.accelerate.train", "examples.fabric.train"])
def test_digits(module: str) -> None:
    """The scripts learn the digits within the budget that they are given."""
    output = run(module, "--epochs", "3")
    assert float(re.findall(r"accuracy: ([0-9.]+)", output)[-1]) > 0.9
    figures = figures_in(output)
    assert figures["measured_peak_bytes"] <= figures["budget_bytes"] == 8 * 2**20 < figures["plain_peak_bytes"]
    assert figures["swapped_bytes"] + figures["recomputed_bytes"] > 0


def test_text() -> None:
    """The Trainer learns the text within its budget."""
    output = run("examples.transformers.train", "--epochs", "1")
    losses = [float(loss) for loss in re.findall(r"'loss': '?([0-9.]+)", output)]
    assert losses[-1] < 0.9 * losses[0]
    figures = figures_in(output)
    assert figures["measured_peak_bytes"] <= figures["budget_bytes"] == 64 * 2**20 < figures["plain_peak_bytes"]


@pytest.mark.parametrize("module", [("examples.pytorch.tune",), ("examples.accelerate.train", "--tune")])
def test_tuner(module: tuple[str, ...]) -> None:
    """The batch size is found among those that were tried, and trained with."""
    output = run(*module, "--epochs", "1")
    size = int(re.findall(r"batch size: (\d+)", output)[-1])
    assert 1 <= size <= 128
    assert len(re.findall("epoch 0: loss", output)) >= 1
