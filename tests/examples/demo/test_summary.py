"""The demo's figures: what the file holds, what the table shows, what counts as a failure."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from examples.demo.summary import DemoSummary, result_table

MIB = 1 << 20
GOOD = DemoSummary(
    identical=True,
    budget_bytes=150 * MIB,
    tracked_steps=(4, 6),
    plain_peak_bytes=200 * MIB,
    measured_peak_bytes=149 * MIB,
    predicted_peak_bytes=148 * MIB,
    floor_bytes=100 * MIB,
    num_pairs=8,
    plain_step_seconds=0.5,
    step_seconds=0.55,
    step_ratio=1.11,
    step_ratio_low=1.04,
    step_ratio_high=1.23,
    kept_bytes=10 * MIB,
    swapped_bytes=20 * MIB,
    recomputed_bytes=30 * MIB,
)


def test_file_holds_the_documented_keys(tmp_path: Path):
    """summary.json has exactly these keys, `identical` a bool, the rest numbers."""
    path = tmp_path / "demo" / "summary.json"
    GOOD.write(path)
    content = json.loads(path.read_text())
    assert list(content) == [
        "identical",
        "budget_bytes",
        "tracked_steps",
        "plain_peak_bytes",
        "measured_peak_bytes",
        "predicted_peak_bytes",
        "floor_bytes",
        "num_pairs",
        "plain_step_seconds",
        "step_seconds",
        "step_ratio",
        "step_ratio_low",
        "step_ratio_high",
        "kept_bytes",
        "swapped_bytes",
        "recomputed_bytes",
    ]
    assert content["identical"] is True
    assert content["budget_bytes"] == 150 * MIB


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"identical": False}, "did not give the plain run's bits"),
        ({"measured_peak_bytes": 151 * MIB}, "1.0 MiB above the budget of 150.0 MiB"),
        ({"measured_peak_bytes": 0}, "no live bytes were counted"),
    ],
)
def test_each_failure_is_named(change: dict[str, int], problem: str):
    """A result that breaks a promise gives one sentence that says which."""
    assert GOOD.problems() == []
    (found,) = replace(GOOD, **change).problems()
    assert problem in found


def test_table_shows_figures_and_verdict():
    """Budget, both peaks, both times, how far to trust them and the verdict of each part can be read."""
    output = io.StringIO()
    Console(file=output, width=80).print(result_table(GOOD, {"losses": True, "statistics": False}, "a title"))
    text = output.getvalue()
    for expected in (
        "a title",
        "150.0 MiB",
        "149.0 MiB (74%)",
        "200.0 MiB",
        "550.0 ms (1.11x)",
        "20.0 MiB",
        "8 pairs",
        "1.04x to 1.23x",
    ):
        assert expected in text
    assert [line.split()[-2] for line in text.splitlines() if "statistics" in line] == ["different"]
