"""Every policy trains real models to the same bits as plain PyTorch: without a budget, and within one."""

from __future__ import annotations

import pytest

from lightning_offload import MemoryPlugin
from lightning_offload.errors import BudgetInfeasibleError
from lightning_offload.planning.planner import POLICIES
from lightning_offload.plugins.report import Report
from tests.engine.harness import assert_same, run
from tests.engine.probing import levels, plain_outcome
from tests.shares import pairs
from tests.zoo.cases import BY_NAME

PUBLISHED = [name for name in POLICIES if name not in ("auto", "keep-all", "all-swap", "all-recompute")]
NEED_A_BUDGET = {"accudnn", "capuchin", "checkmate", "dtr", "pofo", "vdnn-dyn"}
"""Those that do nothing without one."""
CASES = ("resnet-basic", "vgg-batchnorm", "densenet", "gpt2-eager", "t5", "lstm", "seq2seq")
HEIGHT = 0.5


def _train(name: str, policy: str, budget_bytes: int | None) -> None:
    """Train under a policy, compare with plain PyTorch, and check that the plan was in force."""
    memory, reports = MemoryPlugin(budget=budget_bytes, policy=policy), list[Report]()
    outcome = run(BY_NAME[name], memory=memory, after_step=lambda _: reports.append(memory.report()))
    assert_same(plain_outcome(name), outcome)
    last = reports[-1]
    moves = bool(last.swapped_bytes or last.recomputed_bytes)
    assert last.policy == policy
    # A plan that keeps everything has nothing to verify or to measure.
    assert last.phase == "planned" or (last.phase == "verifying" and not moves)
    if budget_bytes is not None:
        assert last.predicted_peak_bytes is not None
        assert last.predicted_peak_bytes <= budget_bytes


@pytest.mark.parametrize(
    ("name", "policy"), pairs(CASES, [name for name in PUBLISHED if name not in NEED_A_BUDGET], every=9)
)
def test_same_bits_under_each_policy(name: str, policy: str) -> None:
    """Losses, gradients, weights, buffers, optimizer and random state are those of plain PyTorch."""
    _train(name, policy, None)


@pytest.mark.parametrize(("name", "policy"), pairs(CASES, PUBLISHED, every=9))
def test_same_bits_within_a_budget_or_a_floor_that_works(name: str, policy: str) -> None:
    """At half the height above the floor, or at the floor that the policy says it needs, the bits are the same."""
    budget = levels(name).budget(HEIGHT)
    try:
        _train(name, policy, budget)
    except BudgetInfeasibleError as error:
        floor = error.floor_bytes
    else:
        return
    assert floor > budget
    _train(name, policy, floor)
