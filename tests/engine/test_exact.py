"""Every case of the zoo gives the same bits under a plan as plain PyTorch."""

from __future__ import annotations

import pytest

from lightning_offload import MemoryPlugin
from tests.engine.harness import Wrap, assert_same
from tests.engine.probing import levels, plain_outcome, run_with, run_within
from tests.zoo.case import Case
from tests.zoo.cases import CASES

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


def _wraps(case: Case, turn: int) -> list[Wrap]:
    """All wraps of a case that is run in full; of another one by turns, so that each wrap meets many cases."""
    if not case.split:
        return [Wrap.WHOLE]
    return list(Wrap) if case.name in FULL_MATRIX else [list(Wrap)[turn % len(Wrap)]]


def _by_height() -> list[object]:
    return [
        pytest.param(case, height, wrap, id=f"{case.name}-{height}-{wrap.value}")
        for number, case in enumerate(CASES)
        for turn, height in enumerate(ALL_HEIGHTS if case.name in FULL_MATRIX else HEIGHTS, number)
        for wrap in _wraps(case, turn)
    ]


def _by_policy() -> list[object]:
    return [
        pytest.param(case, policy, wrap, id=f"{case.name}-{policy}-{wrap.value}")
        for number, case in enumerate(CASES)
        for turn, policy in enumerate(POLICIES, number + 1)
        for wrap in _wraps(case, turn)
    ]


@pytest.mark.parametrize(("case", "height", "wrap"), _by_height())
def test_same_bits_within_a_budget(case: Case, height: float, wrap: Wrap) -> None:
    """Losses, gradients, weights, buffers, optimizer and random state are those of plain PyTorch."""
    outcome, phase = run_within(case, levels(case.name, wrap).budget(height), wrap)
    assert_same(plain_outcome(case.name), outcome)
    if case.static:
        assert phase == "planned"


@pytest.mark.parametrize(("case", "policy", "wrap"), _by_policy())
def test_same_bits_under_a_policy(case: Case, policy: str, wrap: Wrap) -> None:
    """Swapping everything, and recomputing everything that can be, change no bit either."""
    outcome, phase = run_with(case, MemoryPlugin(budget=None, policy=policy), wrap)
    assert_same(plain_outcome(case.name), outcome)
    if case.static:
        assert phase == "planned"
