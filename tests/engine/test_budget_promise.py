"""The budget's promise, on training as users write it, at budgets from the floor to the plain peak.

Each case is held to a share of the budgets here, and to all of them by `make test-budgets`.
"""

from __future__ import annotations

import functools

import pytest

from lightning_offload import MemoryPlugin
from lightning_offload.capture.live import LiveScanClock
from tests.engine.promise import NUM_HEIGHTS, Training, is_close, judge, probe, train, try_budget
from tests.shares import is_all
from tests.zoo.cases_loops import LOOPS, LOOPS_BY_NAME

NUM_BUDGETS = 2 if is_all() else 1
"""How many budgets a case is tried at."""

TYPICAL = ("sam", "lbfgs", "keeping", "gru")


@pytest.fixture(autouse=True)
def every_step_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at what is beside every step, as is done where time allows: the promise is about what is seen."""
    monkeypatch.setattr(LiveScanClock, "is_due", lambda clock, share: True)


def _tries() -> list[object]:
    stride = NUM_HEIGHTS // NUM_BUDGETS
    found = []
    for number, case in enumerate(LOOPS):
        # Different cases at different heights; all of them near the floor once.
        for height in ((7 * number % stride + stride * i) / NUM_HEIGHTS for i in range(NUM_BUDGETS)):
            found.append(pytest.param(case.name, height, id=f"{case.name}-{height}"))
    return found


@pytest.mark.parametrize(("name", "height"), _tries())
def test_promise_is_kept(name: str, height: float) -> None:
    """True peaks are within the budget or it is refused in time; figures are true; bits are plain training's."""
    assert not try_budget(name, height).failures


@pytest.mark.parametrize("name", ["sam", "lbfgs", "batchnorm-modes", "nested-state", "layerdrop"])
def test_smallest_feasible_budget_works(name: str) -> None:
    """A budget below the floor is refused, and the one that the error names is enough."""
    assert not try_budget(name, -0.2, retry=True).failures


@functools.cache
def _unbounded(name: str) -> Training:
    return train(LOOPS_BY_NAME[name], MemoryPlugin(budget="64MiB", policy="all-swap"))


@pytest.mark.parametrize("name", TYPICAL)
def test_reported_plain_peak_is_the_true_one(name: str) -> None:
    """What keeping everything would take is predicted to 2%, with all that lies beside the step."""
    found = probe(name)
    assert is_close(found.reported_plain_peak_bytes, found.plain_peak_bytes)


@pytest.mark.parametrize("name", [name for name in TYPICAL if name != "lbfgs"])  # whose steps are inside of it
def test_optimizer_peak_is_the_true_one(name: str) -> None:
    """What the optimizer's step takes, temporaries included."""
    training = _unbounded(name)
    assert training.report is not None
    assert is_close(training.report.optimizer_peak_bytes, max(training.watch.optimizer_peaks))


@pytest.mark.parametrize("name", TYPICAL)
def test_peaks_of_forward_and_backward_are_the_true_ones(name: str) -> None:
    """Each to 2%, in every step that was measured."""
    steps = [step for step in _unbounded(name).steps if step.measured is not None]
    assert len(steps) >= 2
    for step in steps:
        assert step.measured is not None
        assert is_close(step.measured[0], step.window.peak_bytes)
        assert is_close(step.measured[2], step.backward_peak_bytes)
        assert is_close(step.measured[1], step.forward_peak_bytes)


def test_judge_notices() -> None:
    """A peak above the budget, a figure that is not true and other bits are each called a failure."""
    training, case = _unbounded("keeping"), LOOPS_BY_NAME["keeping"]
    assert training.highest is not None
    peak = training.highest.window.peak_bytes
    assert judge(case, peak, training, training.digest) == []
    over, accepted = judge(case, peak - 1, training, training.digest)
    assert over.startswith("over")
    assert accepted.startswith("accepted")
    (bits,) = judge(case, peak, training, "0")
    assert bits.startswith("bits")
    measured, training.highest.measured = training.highest.measured, (peak // 2, None, None)
    (figure,) = judge(case, peak, training, training.digest)
    assert figure.startswith("figure")
    training.highest.measured = measured
