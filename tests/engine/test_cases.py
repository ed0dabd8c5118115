"""Every case of the zoo, each setting trained once: its bits, its true peak, its report, and what is left of it.

From the 4th step on the true peak of live tensors is within the budget, and the report is right.
"""

from __future__ import annotations

import pytest

from lightning_offload import MemoryPlugin
from tests.engine.harness import Wrap, assert_same
from tests.engine.probing import Measured, Training, levels, train, train_within, trained_plainly, trained_swapping
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


def _settings(number: int, case: Case) -> list[tuple[str | float, Wrap]]:
    """The policies and heights of a case, each with its wraps; a budgeted case is run whole at one height at least."""
    heights = ALL_HEIGHTS if case.name in FULL_MATRIX else HEIGHTS
    found: dict[tuple[str | float, Wrap], None] = {}
    for turn, policy in enumerate(POLICIES, number + 1):
        found.update({(policy, wrap): None for wrap in (Wrap.WHOLE, *_wraps(case, turn))})
    for turn, height in enumerate(heights, number):
        found.update({(height, wrap): None for wrap in _wraps(case, turn)})
    if case.budgeted:
        found[(0.5, 0.0)[BUDGETED.index(case) % 2], Wrap.WHOLE] = None
    return list(found)


def _all() -> list[object]:
    return [
        pytest.param(case, setting, wrap, id=f"{case.name}-{setting}-{wrap.value}")
        for number, case in enumerate(CASES)
        for setting, wrap in _settings(number, case)
    ]


@pytest.mark.parametrize(("case", "setting", "wrap"), _all())
def test_case(case: Case, setting: str | float, wrap: Wrap) -> None:
    """Under a policy, or within the budget at a height between floor and plain peak."""
    if isinstance(setting, float):
        budget_bytes = levels(case.name, wrap).budget(setting)
        found, raised_bytes = train_within(case, budget_bytes, wrap)
        if case.budgeted:
            if wrap is Wrap.WHOLE:
                assert raised_bytes == budget_bytes, "the budget was said to be infeasible"
            check_within(found.steps, raised_bytes, wrap)
    elif setting == "all-swap":
        found = trained_swapping(case.name, wrap)
    else:
        found = train(case, MemoryPlugin(budget=None, policy=setting), wrap=wrap)
    check_same(case, found)


def check_same(case: Case, found: Training) -> None:
    """Losses, gradients, weights, buffers, optimizer and random state are plain's, and so is what stays alive."""
    plain = trained_plainly(case.name)
    assert_same(plain.outcome, found.outcome)
    assert found.live_bytes == plain.live_bytes
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
