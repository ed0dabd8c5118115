"""Figures that are wrong by 30% cost time for two steps, and never memory or a bit."""

from __future__ import annotations

import functools

import pytest

from tests.engine.test_slow_links import STEP_SECONDS, Subject
from tests.engine.test_slow_links import seen_by_a_mode as seen_by_a_mode
from tests.engine.wrong_figures import Step, Wrong, budget_at, train, true_device
from tests.one_thread import one_thread as one_thread


@pytest.fixture(autouse=True)
def short_searches() -> None:
    """Searches are users' own: plans are judged here."""


WRONG = {
    "slower-link": Wrong(link=1 / 0.7),
    "faster-link": Wrong(link=0.7),
    "slower-ops": Wrong(ops=0.7),
    "faster-ops": Wrong(ops=1.3),
}
"""What is true is slower or faster than what is believed."""

SETTINGS = (("mlp", 1.0, 0.1), ("conv-net", 1.0, 0.1), ("gpt2", 1.0, 0.1))
"""Nets, steps that it takes to copy all that is saved, and heights of the budget."""

NUM_STEPS = 4
RELATIVE, ABSOLUTE_SECONDS = 0.1, 0.02 * STEP_SECONDS
"""Overheads that differ by less than 2% of a step are not worth another plan: cf. plugins.correction."""


@functools.cache
def _steps(name: str, link: float, height: float, wrong: Wrong) -> tuple[list[Step], int]:
    subject = Subject.of(name)
    device = true_device(subject, link)
    budget_bytes = budget_at(subject, device, height)
    return train(subject, device, budget_bytes, wrong, NUM_STEPS), budget_bytes


@pytest.mark.parametrize(("name", "link", "height"), SETTINGS)
def test_overhead_is_soon_that_of_true_figures(name: str, link: float, height: float) -> None:
    """The plan in force from the third step on costs at most 10% more than the one made with true figures."""
    true, budget_bytes = _steps(name, link, height, Wrong())
    assert all(step.plan.decisions == true[0].plan.decisions for step in true), "there was nothing to correct"
    allowed = (1 + RELATIVE) * true[0].overhead_seconds + ABSOLUTE_SECONDS
    for why, wrong in WRONG.items():
        steps, _ = _steps(name, link, height, wrong)
        for number, step in enumerate(steps):
            where = f"{why}, step {number}"
            assert step.is_exact, where
            assert step.peak_bytes <= budget_bytes, where
            assert step.measured_seconds == pytest.approx(STEP_SECONDS + step.overhead_seconds, rel=0.05), where
        assert len({step.plan.decisions for step in steps}) == 2, (
            f"{why}: the plan was not made again, or not only once"
        )
        assert max(step.overhead_seconds for step in steps[2:]) <= allowed, why


def test_wrong_figures_cost_time() -> None:
    """Before it is corrected, the plan is slower than that tolerance allows, for each belief but the cautious one."""
    for why in ("slower-link", "faster-link", "slower-ops"):
        costs = []
        for setting in SETTINGS:
            (true, *_), _ = _steps(*setting, Wrong())
            (first, *_), _ = _steps(*setting, WRONG[why])
            costs.append(first.overhead_seconds - (1 + RELATIVE) * true.overhead_seconds)
        assert max(costs) > ABSOLUTE_SECONDS, why
