"""A run keeps each case at once, stops in time, and goes on where the last one stopped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.cases import Case, Search
from benchmarks.gpu.process import Ended, Job
from benchmarks.gpu.runner import Runner
from benchmarks.gpu.store import Store


@dataclass
class Machine:
    """Runs jobs without processes, on a clock of its own; each takes as long as its arguments say."""

    now: float = 0.0
    ran: list[str] = field(default_factory=list)
    outcomes: dict[str, Callable[[Job], Any]] = field(default_factory=dict)

    def clock(self) -> float:
        return self.now

    def launch(self, job: Job, timeout_seconds: float) -> Ended:
        name = job.arguments["name"]
        self.ran.append(name)
        wanted = job.arguments["seconds"]
        took = min(wanted, timeout_seconds)
        self.now += took
        if wanted > timeout_seconds:
            return Ended(state="stopped", message=f"stopped after {took:.0f} s", seconds=took)
        outcome = self.outcomes.get(name, _one_row)(job)
        if isinstance(outcome, str):
            return Ended(state="error", message=outcome, seconds=took)
        return Ended(state="done", content=outcome, seconds=took)


def _one_row(job: Job) -> dict[str, Any]:
    return {
        "rows": [{"case": job.arguments["name"], "metric": "ratio", "value": 1.0, "goal": None}],
        "config": {}, "repeats": 2, "spread": {}, "notes": {},
    }  # fmt: skip


def case(name: str, seconds: float = 10, *, takes: float | None = None, search: Search | None = None) -> Case:
    job = Job(function="", device="cpu", arguments={"name": name, "seconds": seconds if takes is None else takes})
    return Case(key=name, title=f"title of {name}", seconds=seconds, job=job, search=search)


@pytest.fixture
def machine() -> Machine:
    return Machine()


@pytest.fixture
def run(machine: Machine, tmp_path: Path) -> Callable[..., Runner]:
    """Runs cases in a run of its own that reads and writes the same file."""

    def run_cases(*cases: Case, seconds: float = 100) -> Runner:
        store = Store(
            path=tmp_path / "result.json", suite="gpu", device="x", environment={"commit": "abc"},
            order=[case.key for case in cases],
        )  # fmt: skip
        store.load()
        runner = Runner(store=store, quick=False, seconds=seconds, launch=machine.launch, clock=machine.clock)
        runner.run(cases)
        return runner

    return run_cases


def test_finished_cases_are_not_run_again(machine: Machine, run: Callable[..., Runner]):
    """A second run measures only what the first did not."""
    run(case("a"), case("b"))
    runner = run(case("a"), case("b"), case("c"))
    assert machine.ran == ["a", "b", "c"]
    assert [row.case for row in runner.store.measured.rows] == ["a", "b", "c"]


def test_an_error_stops_nobody_and_is_tried_again_last(machine: Machine, run: Callable[..., Runner]):
    """The rest is measured; the next run begins with what is new."""
    machine.outcomes["a"] = lambda job: "CUDA out of memory"
    runner = run(case("a"), case("b"))
    assert runner.store.measured.notes == {"title of a": "CUDA out of memory"}
    assert [(row.case, row.metric) for row in runner.store.measured.rows] == [
        ("title of a", "error"), ("b", "ratio"),
    ]  # fmt: skip
    del machine.outcomes["a"]
    runner = run(case("a"), case("b"), case("c"))
    assert machine.ran == ["a", "b", "c", "a"]
    assert runner.store.measured.notes == {}
    assert [row.case for row in runner.store.measured.rows] == ["a", "b", "c"]


def test_no_case_is_started_that_will_not_fit(machine: Machine, run: Callable[..., Runner]):
    """A smaller one further down still is, and the rest is left for the next run."""
    runner = run(case("a", 60), case("b", 50), case("c", 30), seconds=100)
    assert machine.ran == ["a", "c"]
    assert runner.unfinished == ["b"]
    run(case("a", 60), case("b", 50), case("c", 30), seconds=100)
    assert machine.ran == ["a", "c", "b"]


def test_the_limit_is_hard(machine: Machine, run: Callable[..., Runner]):
    """What still runs when the minutes are over is stopped, and is no error."""
    runner = run(case("a", 10, takes=500), case("b"), seconds=25)
    assert machine.now == 25
    assert runner.unfinished == ["a", "b"]
    assert runner.store.results == {}


def test_a_case_that_outstays_its_time_is_an_error(machine: Machine, run: Callable[..., Runner]):
    """It must not eat the time of all others."""
    runner = run(case("a", 30, takes=5000), case("b"), seconds=1000)
    assert machine.now == pytest.approx(3 * 30 + 10)
    assert runner.store.measured.notes == {"title of a": "took longer than 90 s"}
    assert machine.ran == ["a", "b"]


def searching(name: str, *, compared_with: str = "") -> Case:
    search = Search(limit_bytes=100, first=4, compared_with=compared_with, config={"cap_bytes": 100})
    return case(name, 10, search=search)


def fits_up_to(largest: int) -> Callable[[Job], Any]:
    def outcome(job: Job) -> dict[str, Any]:
        size = job.arguments["batch_size"]
        return {"fits": size <= largest, "figures": {"step_seconds": size / 100}}

    return outcome


def test_a_search_goes_on_from_its_trials(machine: Machine, run: Callable[..., Runner]):
    """Each trial is kept at once, so that the limit costs no more than one."""
    machine.outcomes["a"] = fits_up_to(21)
    first = run(searching("a"), seconds=25)
    assert first.unfinished == ["a"]
    assert sorted(first.store.trials["a"]) == ["4", "8"]
    runner = run(searching("a"), seconds=1000)
    figures = {row.metric: row.value for row in runner.store.measured.rows}
    assert figures["batch_size"] == 21
    assert figures["step_seconds"] == pytest.approx(0.21)
    assert figures["num_trials"] == len(machine.ran)
    assert runner.store.trials == {}


def test_a_search_is_compared_with_the_plain_one(run: Callable[..., Runner], machine: Machine):
    """By how much larger the batch is."""
    machine.outcomes |= {"plain": fits_up_to(10), "managed": fits_up_to(25)}
    runner = run(searching("plain"), searching("managed", compared_with="plain"), seconds=1000)
    rows = {(row.case, row.metric): row.value for row in runner.store.measured.rows}
    assert rows["title of managed", "batch_size_over_plain"] == 2.5
    assert ("title of plain", "batch_size_over_plain") not in rows
