"""The planner's benchmark: its cells, its rows and its page."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from rich.progress import Progress

from benchmarks.planner.cells import BEATEN, DEVICES, HEIGHTS, Cell, cells
from benchmarks.results import Measurements, Options, result_path, write_result
from benchmarks.suites import planner


def cell(height: float, **seconds: float) -> Cell:
    """A cell with a plain step of 10 s and a bound of 11 s."""
    return Cell(
        model="net", device="a100", dtype="float32", height=height, budget_bytes=1, plain_seconds=10.0,
        bound_seconds=11.0, policy_seconds=seconds, planning_seconds=0.1,
    )  # fmt: skip


def test_a_cell_knows_the_best_other_policy() -> None:
    """Ratios are of step times; where nobody else fits there is no rival."""
    found = cell(0.5, auto=12.1, capuchin=13.0, layup=24.2)
    assert found.best_policy == "capuchin"
    assert found.over_bound == pytest.approx(1.1)
    assert found.over_best_policy == pytest.approx(12.1 / 13.0)
    assert cell(0.5, auto=12.1).over_best_policy is None


def test_losses_are_counted_and_goals_depend_on_the_height() -> None:
    """A cell in which a policy is faster by more than a thousandth is lost; near the floor the goal is wider."""
    found = [cell(0.4, auto=12.0, layup=11.5), cell(0.4, auto=12.0, layup=11.99), cell(0.05, auto=12.0, layup=13.0)]
    rows = {(row.case, row.metric): row for row in planner._summary(found)}
    assert rows["all cells with h >= 0.2", "num_cells_lost_to_a_policy"].value == 1
    assert rows["all cells with h < 0.2", "num_cells_lost_to_a_policy"].value == 0
    goals = {c.height: [r.goal for r in planner._rows(c) if r.metric == "auto_over_bound"] for c in found}
    assert goals == {0.4: [1.03], 0.05: [1.05]}
    slow = dataclasses.replace(found[0], model="resnet152", planning_seconds=1.5)
    rows = {(row.case, row.metric): row for row in planner._summary([*found, slow])}
    row = rows["all cells of resnet152", "planning_seconds_most"]
    assert (row.value, row.goal) == (1.5, 1.0)


def test_a_real_cell() -> None:
    """A small AlexNet: auto lies between the bound and every policy that fits."""
    (found,) = cells("alexnet", "k40c", "float32", (0.5,), batch_size=2)
    assert found.plain_seconds <= found.bound_seconds <= found.policy_seconds["auto"]
    assert {"all-swap", "save-on-cpu"} <= found.policy_seconds.keys()
    assert found.over_best_policy is not None
    assert found.over_best_policy <= BEATEN


def test_a_run_goes_on_where_the_last_one_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is stored is not planned again, unless what makes plans has changed, or all is asked for anew."""
    planned: list[str] = []

    def plan_one(pair: tuple[str, str, str, tuple[float, ...], int | None]) -> list[Cell]:
        planned.append(f"{pair[0]} {pair[1]} {pair[2]}")
        return [dataclasses.replace(cell(h, auto=12.0), model=pair[0], device=pair[1], dtype=pair[2]) for h in pair[3]]

    def run(minutes: float | None, *, fresh: bool = False) -> Measurements:
        planned.clear()
        found = planner.run(Options(folder=tmp_path, minutes=minutes, fresh=fresh), Progress(disable=True))
        write_result(result_path("planner", "cpu", tmp_path), "planner", "cpu", found, {})
        return found

    monkeypatch.setattr(planner, "_cells", plan_one)
    monkeypatch.setattr(planner, "ProcessPoolExecutor", lambda num_workers, **_: ThreadPoolExecutor(1))
    monkeypatch.setattr(planner, "MODEL_NAMES", ("a", "b"))
    monkeypatch.setattr(planner.os, "cpu_count", lambda: 1)
    first = run(0.0)
    assert planned == ["a k40c float32"]
    assert first.config["num_left"] == 2 * len(DEVICES) - 1
    assert run(None).config["num_left"] == 0
    assert len(planned) == len(set(planned)) == 2 * len(DEVICES) - 1
    assert len(run(None).config["cells"]) == 2 * len(DEVICES) * len(HEIGHTS)
    assert planned == []
    run(None, fresh=True)
    assert len(planned) == 2 * len(DEVICES)
    monkeypatch.setattr(planner, "code_digest", lambda: "other")
    run(0.0)
    assert planned == ["a k40c float32"]
