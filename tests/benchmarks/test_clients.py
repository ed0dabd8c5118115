"""The suite of other people's packages: what it watches and how it judges, on a training that needs none of them."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.__main__ import main
from benchmarks.clients import judging, judging_sizes
from benchmarks.clients.listing import CLIENTS
from benchmarks.clients.watching import note_end, watching

TRAININGS = Path(__file__).resolve().parents[2] / "benchmarks" / "clients" / "trainings"


def seen(**changes: Any) -> dict[str, Any]:
    return {
        "losses": ["a", "b"], "weights": "w", "random_state": "r", "cpu_seconds": [9.0, 1.0, 3.0, 2.0],
        "peak_bytes": [100, 200, 150], "allocated_bytes": 160, "phases": [], "warnings": [], **changes,
    }  # fmt: skip


def run(**changes: Any) -> dict[str, Any]:
    return {"state": "done", "message": "", "seen": seen(**changes)}


@pytest.fixture
def found() -> dict[str, Any]:
    """What a training brings that is well."""
    planned = {"phases": ["recording", "planned", "planned"], "peak_bytes": [190, 150, 140]}
    runs = {
        "plain, counted": run(), "tight, counted": run(**planned), "ample, counted": run(**planned),
        "plain, timed": run(), "tight, timed": run(**planned, cpu_seconds=[9.0, 2.0, 6.0, 4.0]),
        "ample, timed": run(**planned), "plain, timed again": run(),
    }  # fmt: skip
    return {"versions": {}, "refused": {}, "share": 0.75, "budget_bytes": 150, "runs": runs}


def test_figures(found: dict[str, Any]):
    """Peaks are those of steps under a plan, ratios those of medians of the second half."""
    assert judging.faults(found) == []
    figures = judging.figures(found)
    assert figures["plain_peak_bytes"] == 200
    assert (figures["tight_first_peak_bytes"], figures["tight_peak_bytes"]) == (190, 150)
    assert (figures["num_tight_planned"], figures["num_steps"]) == (2, 3)
    assert figures["tight_ratio"] == 2.0
    assert figures["ample_ratio"] == figures["plain_again_ratio"] == 1.0


def test_faults(found: dict[str, Any]):
    """Other bits, a peak above the budget, an error, and a watch that saw nothing fail the suite.

    The plugin may say that no plan is within the budget any more: then a peak above it is no fault.
    """

    def faults(label: str, **changes: Any) -> list[str]:
        spoiled = copy.deepcopy(found)
        for name, run in spoiled["runs"].items():
            if name == label or not label:
                run.update({key: value for key, value in changes.items() if key in run})
                run["seen"].update({key: value for key, value in changes.items() if key in run["seen"]})
        return judging.faults(spoiled)

    above = {"peak_bytes": [190, 150, 151]}
    for label, changes, told in (
        ("ample, timed", {"losses": ["a", "c"]}, "ample, timed: losses differ"),
        ("tight, counted", {"weights": "v"}, "tight, counted: weights differ"),
        ("tight, counted", above, "151 bytes under a plan, above the budget of 150, untold"),
        ("tight, timed", {"state": "error", "message": "RuntimeError: no"}, "tight, timed: RuntimeError: no"),
        ("", {"losses": []}, "no step was seen"),
    ):
        (fault,) = faults(label, **changes)
        assert told in fault
    assert faults("tight, counted", **above, warnings=["no plan is within the budget any more"]) == []


def test_refusal_is_no_fault(found: dict[str, Any]):
    """Where no budget is feasible there are the plain and the ample runs."""
    for label in ("tight, counted", "tight, timed"):
        del found["runs"][label]
    del found["budget_bytes"], found["share"]
    assert judging.faults(found) == []
    assert judging.is_refused(found)
    assert "tight_ratio" not in judging.figures(found)


@pytest.fixture
def sized() -> dict[str, Any]:
    """What a training brings whose size a finder changed for throughput, and kept otherwise."""
    kept = {"batch_size": 8, "configured": 8, "is_kept": True, "seconds": 1.0, "trials": [], "note": "Too short."}
    trials = [(8, 10.0), (32, 30.0), (64, 31.0), (8, 12.0)]
    changed = {**kept, "batch_size": 32, "is_kept": False, "seconds": 30.0, "trials": trials, "note": ""}
    common = {"is_over": True, "before_seconds": 1.5, "run_seconds": 33.0, "num_batches": 10}
    runs = {
        "plain": {**run(), "tuned": {**common, "before_seconds": 0.25, "result": None}},
        "defaults": {**run(), "tuned": {**common, "result": kept}},
        "throughput": {**run(weights="v"), "tuned": {**common, "num_batches": 3, "result": changed}},
    }
    return {"versions": {}, "has_size": True, "runs": runs}


def test_figures_of_sizes(sized: dict[str, Any]):
    """Sizes that were tried twice count once; the clock outside counts where it says more."""
    assert judging_sizes.faults(sized) == []
    figures = judging_sizes.figures(sized)
    assert (figures["num_configured"], figures["num_defaults"], figures["num_throughput"]) == (8, 8, 32)
    assert figures["throughput_gain"] == 30 / 11
    assert figures["throughput_best_gain"] == 31 / 11
    assert (figures["defaults_finder_seconds"], figures["throughput_finder_seconds"]) == (1.25, 30.0)
    assert judging_sizes.told(sized) == ["defaults: Too short."]


@pytest.mark.parametrize(
    ("label", "changes", "told"),
    [
        ("defaults", {"is_over": False}, "the fit did not come to its end"),
        ("defaults", {"before_seconds": 70.0}, "the finder took 70 s, more than 60 s"),
        ("defaults", {"result": None}, "nothing was tuned, and 0 warnings say why"),
        ("throughput", {"num_batches": 10}, "10 batches an epoch, not 2.5"),
        ("throughput", {"batch_size": 8}, "8 was kept, where trials show a size that is 2.82 times as fast"),
        ("throughput", {"trials": []}, "nothing was tried"),
        ("throughput", {"is_kept": True, "note": "Kept."}, "nothing was changed, but weights differ"),
    ],
)
def test_faults_of_sizes(sized: dict[str, Any], label: str, changes: dict[str, Any], told: str):
    """What a finder must not do fails the suite."""
    tuned = sized["runs"][label]["tuned"]
    tuned.update({name: value for name, value in changes.items() if name in tuned})
    if tuned["result"] is not None:
        tuned["result"].update({name: value for name, value in changes.items() if name in tuned["result"]})
    assert any(told in fault for fault in judging_sizes.faults(sized))


def test_watch_sees_steps_from_outside():
    """Losses, peaks and times of each step, whoever trains; nothing of it stays."""
    before = torch.autograd.backward
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters())
    with watching(counts=True) as watched:
        for _ in range(3):
            model(torch.ones(256, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    note_end(watched, model)
    assert torch.autograd.backward is before
    assert len(watched.losses) == len(watched.peak_bytes) == 3
    assert len(set(watched.losses)) == 3
    assert len(watched.cpu_seconds) == 2
    assert min(watched.peak_bytes) > 3 * 256 * 64 * 4
    assert watched.phases == watched.warnings == []
    assert watched.weights
    assert watched.random_state


def test_rehearsal(capsys: pytest.CaptureFixture[str]):
    """All runs of a loop in plain PyTorch, in processes of their own; nothing is stored."""
    assert main(["clients", "--quick", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    found = {row["metric"]: row["value"] for row in rows}
    assert {row["case"] for row in rows} == {"a loop in plain PyTorch"}
    assert 0 < found["tight_peak_bytes"] <= found["budget_bytes"] < found["plain_peak_bytes"]
    assert 0 < found["num_tight_planned"] < found["num_steps"] == 12


def test_clients_have_trainings():
    """Each has its module."""
    assert all((TRAININGS / f"{client.training or client.name}.py").exists() for client in CLIENTS)
