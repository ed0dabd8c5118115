"""Searches on modules that sleep: here a fake clock passes the time."""

from __future__ import annotations

import pytest

from benchmarks.tuner import sleeping
from benchmarks.tuner.sleeping import SHAPES, measure_overhead, search


class FakeTime:
    """A clock that only sleeping and `lag` move: what every reading costs."""

    def __init__(self, lag: float = 0.0) -> None:
        self.now, self.lag = 0.0, lag

    def sleep(self, seconds: float) -> None:
        assert seconds >= 0
        self.now += seconds

    def perf_counter(self) -> float:
        self.now += self.lag
        return self.now


@pytest.fixture
def fake_time(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    """Nothing in the module sleeps for real."""
    fake = FakeTime()
    monkeypatch.setattr(sleeping, "time", fake)
    return fake


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.usefixtures("fake_time")
def test_searches_are_right_on_known_curves(shape: str) -> None:
    """Where nothing but the drawn noise disturbs, at most one of ten is wrong, within the limit of trials."""
    outcomes = [search(shape, seed, tolerance=0.03, overhead_seconds=0.0) for seed in range(10)]
    assert [outcome.error for outcome in outcomes] == [""] * 10
    assert sum(outcome.is_right for outcome in outcomes) >= 9
    assert max(outcome.num_trials for outcome in outcomes) <= 24
    assert all(outcome.chosen is not None and outcome.chosen <= outcome.edge for outcome in outcomes)


def test_overhead_is_what_a_step_costs_beside_its_sleep(fake_time: FakeTime) -> None:
    """On a clock whose readings take a millisecond a step takes one more than its sleep."""
    fake_time.lag = 1e-3
    assert measure_overhead() == pytest.approx(1e-3)


def test_a_search_that_fails_is_an_outcome(fake_time: FakeTime, monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts as wrong and keeps its reason."""

    def fail(run: object, space: object) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(sleeping, "find_batch_size", fail)
    outcome = search("peaked", 0, tolerance=0.03, overhead_seconds=0.0)
    assert (outcome.is_right, outcome.chosen, outcome.error) == (False, None, "RuntimeError: no")
