"""From the 4th step on, the true peak of live tensors is within the budget, and the report is right."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from lightning_offload import MemoryPlugin
from lightning_offload.errors import BudgetInfeasibleError
from lightning_offload.plugins.report import Report
from tests.engine.harness import Outcome, Wrap, assert_same, run
from tests.engine.live_tracker import LiveStorageTracker
from tests.engine.probing import levels
from tests.zoo.case import Case
from tests.zoo.cases import BY_NAME, CASES

FIRST_STEADY_STEP = 3
"""Steps count from 0: recorded, verified, measured, and final from the fourth on."""

BUDGETED = [case for case in CASES if case.budgeted]
TYPICAL = [BY_NAME[name] for name in ("resnet-basic", "gpt2-sdpa", "lstm", "views-of-one-storage")]


def _heights() -> list[object]:
    return [
        pytest.param(case, height, id=f"{case.name}-{height}")
        for number, case in enumerate(BUDGETED)
        for height in ((0.75, 0.5, 0.25, 0.0) if case in TYPICAL else (0.5, 0.0)[number % 2 :])
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The true peak of one step, the op at which it was reached, and what the plugin reported after it."""

    peak_bytes: int
    peak_op: str
    report: Report


def measure(case: Case, memory: MemoryPlugin, *, steps: int = 5, wrap: Wrap = Wrap.WHOLE) -> list[Measured]:
    """Train under the tracker, without recording anything that would itself take memory."""
    tracker = LiveStorageTracker()
    found: list[Measured] = []

    @contextmanager
    def around() -> Iterator[None]:
        with tracker.window() as window:
            yield
        found.append(Measured(peak_bytes=window.peak_bytes, peak_op=window.peak_op, report=memory.report()))

    with tracker:
        run(
            case,
            memory=memory,
            wrap=wrap,
            steps=steps,
            around=around,
            on_start=lambda job: tracker.register(job.model, *job.optimizers),
            record=False,
        )
    return found


def check_steady(steps: list[Measured], budget_bytes: int) -> None:
    """Hold each steady step against the budget and its report."""
    for index, step in enumerate(steps[FIRST_STEADY_STEP:], FIRST_STEADY_STEP):
        where = f"step {index}, peak at {step.peak_op}"
        assert step.peak_bytes <= budget_bytes, where
        assert step.report.measured_peak_bytes == pytest.approx(step.peak_bytes, rel=0.02), where
        assert step.report.predicted_peak_bytes == pytest.approx(step.peak_bytes, rel=0.05), where


@pytest.mark.parametrize(("case", "height"), _heights())
def test_true_peak_is_within_the_budget(case: Case, height: float) -> None:
    """The tracker's peak stays within the budget, is the measured one to 2% and the predicted one to 5%."""
    budget_bytes = levels(case.name).budget(height)
    check_steady(measure(case, MemoryPlugin(budget=budget_bytes)), budget_bytes)


@pytest.mark.parametrize("wrap", [Wrap.FORWARD, Wrap.BARE], ids=lambda wrap: wrap.value)
@pytest.mark.parametrize("case", TYPICAL, ids=str)
def test_split_steps_are_within_the_budget(case: Case, wrap: Wrap) -> None:
    """With `step()` around forward alone, the peak of forward and backward together is within the budget."""
    budget_bytes = levels(case.name, wrap).budget(0.5)
    steps = measure(case, MemoryPlugin(budget=budget_bytes), wrap=wrap)
    if wrap is Wrap.FORWARD:
        check_steady(steps, budget_bytes)
    assert max(step.peak_bytes for step in steps[FIRST_STEADY_STEP:]) <= budget_bytes


@pytest.mark.parametrize("case", BUDGETED, ids=str)
def test_plain_peak_is_right(case: Case) -> None:
    """`plain_peak_bytes` is, within 5%, the peak of a step without the plugin."""
    tracker = LiveStorageTracker()
    peaks: list[int] = []

    @contextmanager
    def around() -> Iterator[None]:
        with tracker.window() as window:
            yield
        peaks.append(window.peak_bytes)

    with tracker:
        run(
            case,
            steps=3,
            around=around,
            on_start=lambda job: tracker.register(job.model, *job.optimizers),
            record=False,
        )
    assert levels(case.name).plain_peak_bytes == pytest.approx(peaks[-1], rel=0.05)


@pytest.mark.parametrize("case", TYPICAL, ids=str)
def test_floor_is_well_below_the_plain_peak(case: Case) -> None:
    """What can be saved is worth having: the floor is at most 70% of the plain peak."""
    found = levels(case.name)
    assert found.floor_bytes <= 0.7 * found.plain_peak_bytes


@pytest.mark.parametrize("case", TYPICAL, ids=str)
def test_infeasible_budget_names_the_smallest_feasible_one(case: Case) -> None:
    """Too small a budget raises before any step runs under the plan; the budget that it names works."""
    too_small = max(1 << 20, int(0.9 * levels(case.name).floor_bytes))
    outcome = Outcome()
    memory = MemoryPlugin(budget=too_small)
    steps_begun = 0

    @contextmanager
    def around() -> Iterator[None]:
        nonlocal steps_begun
        steps_begun += 1
        yield

    with pytest.raises(BudgetInfeasibleError) as caught:
        run(
            case,
            memory=memory,
            around=around,
            after_step=lambda job: outcome.add(f"after{job.index}/", job.model.state_dict()),
        )
    error = caught.value
    assert steps_begun == 2, "the step that would be the first under the plan is the one that raises"
    assert error.budget_bytes == too_small
    assert error.floor_bytes > too_small
    assert error.op
    assert error.op in str(error)
    expected = Outcome()
    run(case, steps=1, after_step=lambda job: expected.add(f"after{job.index}/", job.model.state_dict()))
    assert_same(expected, outcome)
    check_steady(measure(case, MemoryPlugin(budget=error.floor_bytes)), error.floor_bytes)


@pytest.mark.parametrize("case", TYPICAL, ids=str)
def test_a_budget_that_plain_fits_in_keeps_everything(case: Case) -> None:
    """Nothing is moved or computed again where the plain step fits."""
    budget_bytes = int(1.2 * levels(case.name).plain_peak_bytes)
    report = measure(case, MemoryPlugin(budget=budget_bytes))[-1].report
    assert report.swapped_bytes == 0
    assert report.recomputed_bytes == 0
    assert report.kept_bytes > 0


@pytest.mark.parametrize("case", CASES, ids=str)
def test_nothing_outlives_its_step(case: Case) -> None:
    """After each step the same bytes are alive as after a plain one, without the garbage collector's help."""
    gc.disable()
    try:
        plain = _live_after_steps(case, None)
        planned = _live_after_steps(case, MemoryPlugin(budget=None, policy="all-swap"))
        recomputed = _live_after_steps(case, MemoryPlugin(budget=None, policy="all-recompute"))
    finally:
        gc.enable()
    assert planned == plain
    assert recomputed == plain


def _live_after_steps(case: Case, memory: MemoryPlugin | None) -> list[int]:
    tracker = LiveStorageTracker()
    live: list[int] = []
    with tracker:
        run(
            case,
            memory=memory,
            on_start=lambda job: tracker.register(job.model, *job.optimizers),
            after_step=lambda _: live.append(tracker.live_bytes),
            record=False,
        )
    return live
