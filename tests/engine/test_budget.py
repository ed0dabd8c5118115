"""Budgets at both ends: too small ones name one that works, and where the plain step fits nothing is done to it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from lightning_offload import MemoryPlugin
from lightning_offload.errors import BudgetInfeasibleError
from tests.engine.harness import Outcome, assert_same, run
from tests.engine.probing import levels, train
from tests.engine.test_cases import TYPICAL, check_within
from tests.zoo.case import Case


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
    check_within(train(case, MemoryPlugin(budget=error.floor_bytes)).steps, error.floor_bytes)


@pytest.mark.parametrize("case", TYPICAL, ids=str)
def test_a_budget_that_plain_fits_in_keeps_everything(case: Case) -> None:
    """Nothing is moved or computed again where the plain step fits."""
    budget_bytes = int(1.2 * levels(case.name).plain_peak_bytes)
    report = train(case, MemoryPlugin(budget=budget_bytes)).steps[-1].report
    assert report is not None
    assert report.swapped_bytes == 0
    assert report.recomputed_bytes == 0
    assert report.kept_bytes > 0
