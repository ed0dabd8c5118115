"""Every case of the zoo, each setting trained once: its bits, its true peak, its report, and what is left of it.

Most cases are trained under one of two policies tracked, under the other one untracked, and at one of two heights, by
turns; under both, either way, where nothing is left out.

From the 4th step on the true peak of live tensors is within the budget, and the report is right.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from lightning_offload import MemoryPlugin
from tests.engine.harness import Wrap, assert_same
from tests.engine.probing import (
    Measured,
    Training,
    levels,
    plain_outcome,
    train,
    train_within,
    trained_plainly,
    trained_swapping,
)
from tests.shares import is_all
from tests.zoo.case import Case
from tests.zoo.cases import BY_NAME, CASES

FIRST_STEADY_STEP = 3
"""Steps count from 0: recorded, verified, measured, and final from the fourth on."""

ALL_HEIGHTS = (0.75, 0.5, 0.25, 0.0)
HEIGHTS = (0.25, 0.0)
POLICIES = ("all-swap", "all-recompute")
FULL_MATRIX = {
    "resnet-basic",
    "gpt2-sdpa",
    "lstm",
    "inplace-residual",
    "views-of-one-storage",
    "own-generator",
    "conjugates",
    "custom-function",
    "tied-weights",
}
"""Different enough from one another to run at every height, and under every policy with every wrap."""

BUDGETED = [case for case in CASES if case.budgeted]
TYPICAL = [BY_NAME[name] for name in ("resnet-basic", "gpt2-sdpa", "lstm", "views-of-one-storage")]


def _wraps(case: Case, turn: int) -> list[Wrap]:
    """All wraps of a case that is run in full; of another one by turns, so that each wrap meets many cases."""
    if not case.split:
        return [Wrap.WHOLE]
    return list(Wrap) if case.name in FULL_MATRIX else [list(Wrap)[turn % len(Wrap)]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How a case is trained: under a policy, or at a height between floor and plain peak.

    Attributes:
        how: The policy, or the height.
        wrap: Which part of a step the plugin surrounds.
        is_tracked: Whether true peaks and what stays alive are looked at, too.
    """

    how: str | float
    wrap: Wrap
    is_tracked: bool

    def __str__(self) -> str:
        return f"{self.how}-{self.wrap.value}{'-tracked' if self.is_tracked else ''}"


def _settings(number: int, case: Case) -> list[Setting]:
    """Policies and heights, each with its wraps; tracked once under a policy at least, and at one height at least."""
    heights = ALL_HEIGHTS if case.name in FULL_MATRIX else HEIGHTS
    is_whole = case.name in FULL_MATRIX or is_all()
    tracked: list[str | float] = [*(POLICIES if is_whole else (POLICIES[1 - number % 2],))]
    if case.budgeted:
        tracked += ALL_HEIGHTS if case in TYPICAL else [(0.5, 0.0)[BUDGETED.index(case) % 2]]
    found = [Setting(how=how, wrap=Wrap.WHOLE, is_tracked=True) for how in tracked]
    if case in TYPICAL:
        found += [Setting(how=0.5, wrap=wrap, is_tracked=True) for wrap in (Wrap.FORWARD, Wrap.BARE)]
    for hows, first in ((POLICIES, number + 1), (heights, number)):
        for turn, how in enumerate(hows, first):
            if is_whole or (number + turn - first) % 2 == 0:
                found += [Setting(how=how, wrap=wrap, is_tracked=False) for wrap in _wraps(case, turn)]
    return found


def _all() -> list[object]:
    return [
        pytest.param(case, setting, id=f"{case.name}-{setting}")
        for number, case in enumerate(CASES)
        for setting in _settings(number, case)
    ]


@pytest.mark.parametrize(("case", "setting"), _all())
def test_case(case: Case, setting: Setting) -> None:
    """Bits, and where it is tracked true peaks, the report, and what stays alive: all of one training."""
    how, wrap, is_tracked = setting.how, setting.wrap, setting.is_tracked
    if isinstance(how, float):
        budget_bytes = levels(case.name, wrap).budget(how)
        found, raised_bytes = train_within(case, budget_bytes, wrap, is_tracked=is_tracked)
        if is_tracked:
            assert raised_bytes == budget_bytes, "the budget was said to be infeasible"
            check_within(found.steps, budget_bytes, wrap)
    elif how == "all-swap" and is_tracked:
        found = trained_swapping(case.name, wrap)
    else:
        found = train(case, MemoryPlugin(budget=None, policy=how), wrap=wrap, is_tracked=is_tracked)
    check_same(case, found)


def check_same(case: Case, found: Training) -> None:
    """Losses, gradients, weights, buffers, optimizer and random state are plain's, and so is what stays alive."""
    if found.is_tracked:
        plain = trained_plainly(case.name)
        assert_same(plain.outcome, found.outcome)
        assert found.live_bytes == plain.live_bytes
    else:
        assert_same(plain_outcome(case.name), found.outcome)
    if case.static:
        assert found.phase == "planned"


def check_within(steps: list[Measured], budget_bytes: int, wrap: Wrap = Wrap.WHOLE) -> None:
    """The true peak of each steady step is within the budget, is the measured one to 2% and the predicted one to 5%."""
    assert len(steps) > FIRST_STEADY_STEP
    for index, step in enumerate(steps[FIRST_STEADY_STEP:], FIRST_STEADY_STEP):
        where = f"step {index}, peak at {step.peak_op}"
        assert step.peak_bytes <= budget_bytes, where
        if wrap is Wrap.BARE:
            continue  # the plugin does not see how backward ends
        assert step.report is not None
        assert step.report.measured_peak_bytes == pytest.approx(step.peak_bytes, rel=0.02), where
        assert step.report.predicted_peak_bytes == pytest.approx(step.peak_bytes, rel=0.05), where


@pytest.mark.parametrize("case", BUDGETED, ids=str)
def test_plain_peak_is_right(case: Case) -> None:
    """`plain_peak_bytes` is, within 5%, the peak of a step without the plugin."""
    assert levels(case.name).plain_peak_bytes == pytest.approx(
        trained_plainly(case.name).steps[-1].peak_bytes, rel=0.05
    )


@pytest.mark.parametrize("case", TYPICAL, ids=str)
def test_floor_is_well_below_the_plain_peak(case: Case) -> None:
    """What can be saved is worth having: the floor is at most 70% of the plain peak."""
    found = levels(case.name)
    assert found.floor_bytes <= 0.7 * found.plain_peak_bytes
