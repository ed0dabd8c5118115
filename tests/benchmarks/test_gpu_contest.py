"""A contest measures every contender, and survives those that fail."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from benchmarks.gpu.contest import PEERS, contest
from benchmarks.results import Measurements

CPU = torch.device("cpu")


def run(**arguments: Any) -> Measurements:
    defaults = {"model": "resnet50", "title": "R", "budgets": ["h=0.5"], "peers": (), "num_rounds": 2}
    return contest(CPU, quick=True, **{**defaults, **arguments})


def figures(measured: Measurements, title: str) -> dict[str, float]:
    return {row.metric: row.value for row in measured.rows if row.case == title}


def test_all_contenders_have_their_rows():
    """Ratio with interval, times, peaks and predictions of each; the peaks are in the order of the budgets."""
    measured = run(budgets=["h=0.75", "h=0.1"], peers=PEERS)
    peers = ["R, checkpoint per block", "R, selective checkpoint", "R, save_on_cpu"]
    titles = ["R, plain", "R, h = 0.75", "R, h = 0.1", *peers]
    assert {row.case for row in measured.rows} == set(titles)
    assert all(math.isfinite(row.value) for row in measured.rows)
    for title in titles[1:]:
        found = figures(measured, title)
        assert {"ratio", "ratio_low", "ratio_high", "step_seconds", "peak_bytes"} <= found.keys()
        assert {"run_ratio", "run_ratio_low", "run_ratio_high", "run_step_seconds"} <= found.keys()
    for title in titles[1:3]:
        found = figures(measured, title)
        assert found["peak_bytes"] <= found["budget_bytes"]
        assert {"predicted_peak_bytes", "predicted_step_seconds", "stall_seconds", "host_peak_bytes"} <= found.keys()
    peaks = [figures(measured, title)["peak_bytes"] for title in titles[:3]]
    assert peaks == sorted(peaks, reverse=True)
    assert measured.repeats == 2
    assert measured.notes == {}


def test_budgets_and_goals():
    """`fits` keeps everything; a share of the activations lies between floor and plain; goals stand at ratios."""
    measured = run(budgets=["fits", "activations=0.4"], goals={"fits": 1.01, "activations=0.4": 1.08})
    fits = figures(measured, "R, budget fits the plain step")
    assert fits["swapped_bytes"] == fits["recomputed_bytes"] == 0
    share = figures(measured, "R, 40% of its activation bytes")
    assert share["floor_bytes"] <= share["peak_bytes"] <= share["budget_bytes"] < fits["peak_bytes"]
    goals = {row.case: row.goal for row in measured.rows if row.goal is not None}
    assert list(goals.values()) == [1.01, 1.08]
    assert "R, plain" not in {row.case for row in measured.rows}


def test_a_contender_that_fails_leaves_and_is_noted():
    """A budget below the floor is an error row with its reason; the others are measured."""
    measured = run(budgets=["h=-0.5", "h=0.5"])
    assert figures(measured, "R, h = -0.5") == {"error": 1.0}
    assert "BudgetInfeasibleError" in measured.notes["R, h = -0.5"]
    assert "ratio" in figures(measured, "R, h = 0.5")


def test_budgets_at_the_peaks_of_peers():
    """A peer is compared with at the memory that it needs, or at the least that is feasible."""
    measured = run(budgets=[f"peak={name}" for name in PEERS], peers=PEERS)
    for name in PEERS:
        peak = figures(measured, f"R, {name}")["peak_bytes"]
        ours = figures(measured, f"R, at the peak of {name}")
        assert ours["peak_bytes"] <= ours["budget_bytes"] == max(peak, ours["floor_bytes"])
    assert measured.notes == {}


@pytest.mark.parametrize("text", ["half", "peak=nothing", "peak=save_on_cpu"])
def test_unknown_budget_is_refused(text: str):
    """The error says how budgets are written; without peers there are no peaks of theirs."""
    with pytest.raises(ValueError, match=r"write 'h=0\.5'"):
        run(budgets=[text])
