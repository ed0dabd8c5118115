"""Every case of the zoo gives the same bits on CUDA under a plan as plain CUDA does."""

from __future__ import annotations

import pytest

from lightning_offload import MemoryPlugin
from tests.engine.harness import Wrap
from tests.gpu.device import MARKS, TOLERANT
from tests.gpu.probing import check_planned, check_same, levels_of, plain_of, train, train_within
from tests.zoo.case import Case
from tests.zoo.cases import BY_NAME, CASES

pytestmark = [*MARKS, TOLERANT]

SETTINGS = ("h=0.5", "h=0.25", "h=0", "all-swap", "all-recompute")
SPLIT = ("resnet-basic", "gpt2-sdpa", "lstm", "views-of-one-storage", "own-generator", "retain-graph")
"""Whose forward is wrapped alone as well."""


def _splits() -> list[object]:
    return [
        pytest.param(BY_NAME[name], setting, wrap, id=f"{name}-{setting}-{wrap.value}")
        for name in SPLIT
        for setting in ("h=0.25", "all-recompute")
        for wrap in (Wrap.FORWARD, Wrap.BARE)
    ]


def check(case: Case, setting: str, wrap: Wrap) -> None:
    plain = plain_of(case)
    if setting.startswith("h="):
        budget_bytes = levels_of(case, wrap).budget(float(setting.removeprefix("h=")))
        trained = train_within(case, budget_bytes, plain=plain, wrap=wrap)
    else:
        trained = train(case, MemoryPlugin(budget=None, policy=setting), plain=plain, wrap=wrap)
    check_same(case, plain, trained)
    check_planned(case, trained)


# Cases come first, so that what is remembered of a case serves all its settings.
@pytest.mark.parametrize(("case", "setting"), [pytest.param(c, s, id=f"{c.name}-{s}") for c in CASES for s in SETTINGS])
def test_same_bits(case: Case, setting: str) -> None:
    """Losses, gradients, weights, buffers, optimizer and random state are those of plain PyTorch."""
    check(case, setting, Wrap.WHOLE)


@pytest.mark.parametrize(("case", "setting", "wrap"), _splits())
def test_same_bits_with_split_steps(case: Case, setting: str, wrap: Wrap) -> None:
    """With `step()` around forward alone, too."""
    check(case, setting, wrap)
