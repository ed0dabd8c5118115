"""What plain training leaves behind on the device under test, and where a case's budgets lie there."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest
import torch

from lightning_offload import MemoryPlugin
from lightning_offload.errors import BudgetInfeasibleError
from tests.engine.harness import Outcome, Wrap, differences, run
from tests.engine.probing import NUM_RETRIES, Levels
from tests.gpu.device import DEVICE, NOT_DETERMINISTIC, clean, deterministic
from tests.zoo.case import Case

_NUM_PROBING_STEPS = 4
NUM_DOUBTS = 2
"""How often plain training is repeated where something differs, to see whether it repeats itself."""

Around = Callable[[], AbstractContextManager[Any]]
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plain:
    """What plain training left behind.

    Attributes:
        outcome: All of it.
        has_exceptions: Whether some of its ops have no deterministic kernel.
    """

    outcome: Outcome
    has_exceptions: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What training under a plugin left behind, and what the plugin said at the end."""

    outcome: Outcome
    phase: str
    num_mismatched: int


def repeatably(run: Callable[[], T]) -> tuple[T, bool]:
    """Run something with deterministic kernels; where an op has none, with those that there are.

    Not with the latter at once: asked only to warn, attention computes its gradients in whatever order comes.

    Returns:
        What it gave, and whether some of its ops have no deterministic kernel.
    """
    try:
        with deterministic(warn_only=False):
            return run(), False
    except RuntimeError as error:
        if NOT_DETERMINISTIC not in str(error):
            raise
    with deterministic(warn_only=True):
        return run(), True


def train_plainly(case: Case, *, around: Around = nullcontext) -> Plain:
    """Train without a plugin, with deterministic kernels wherever there are any."""
    outcome, has_exceptions = repeatably(lambda: run(case, device=str(DEVICE), around=around))
    return Plain(outcome=outcome, has_exceptions=has_exceptions)


@functools.lru_cache(maxsize=4)
def plain_of(case: Case) -> Plain:
    """Train a case plainly; remembered for the tests that follow."""
    return train_plainly(case)


@functools.lru_cache(maxsize=4)
def levels_of(case: Case, wrap: Wrap = Wrap.WHOLE) -> Levels:
    """Probe a case: the highest floor and plain peak of any of its steps."""
    memory = MemoryPlugin(budget=None, policy="all-swap")
    found: list[tuple[int, int]] = []

    @contextmanager
    def around() -> Iterator[None]:
        yield
        report = memory.report()
        found.append((report.floor_bytes or 0, report.plain_peak_bytes or 0))

    steps = _NUM_PROBING_STEPS if case.static else case.steps
    run(case, memory=memory, wrap=wrap, around=around, steps=steps, device=str(DEVICE), record=False)
    floor_bytes, plain_bytes = max(low for low, _ in found), max(high for _, high in found)
    # cuDNN takes other algorithms from step to step while it tries them: then the two are of different ones.
    assert floor_bytes > 0
    assert floor_bytes <= plain_bytes or torch.backends.cudnn.benchmark, (floor_bytes, plain_bytes)
    return Levels(floor_bytes=floor_bytes, plain_peak_bytes=max(floor_bytes, plain_bytes))


def train(
    case: Case, memory: MemoryPlugin, *, plain: Plain, wrap: Wrap = Wrap.WHOLE, around: Around = nullcontext
) -> Trained:
    """Train under a plugin, with the kernels that plain training had."""
    reports = []
    with deterministic(warn_only=plain.has_exceptions):
        outcome = run(
            case,
            memory=memory,
            wrap=wrap,
            device=str(DEVICE),
            around=around,
            after_step=lambda _: reports.append(memory.report()),
        )
    return Trained(outcome=outcome, phase=reports[-1].phase, num_mismatched=reports[-1].num_mismatched)


def train_within(
    case: Case,
    budget_bytes: int,
    *,
    plain: Plain,
    wrap: Wrap = Wrap.WHOLE,
    around: Around = nullcontext,
) -> Trained:
    """Train within a budget.

    It may be raised to what an error names: a graph that changes needs more, so do other settings than those that the
    floor was probed under, and close to the floor of a small model what blocks of the allocator take counts, which is
    measured. `test_memory` holds budgets to their word.
    """
    for _ in range(NUM_RETRIES):
        try:
            return train(case, MemoryPlugin(budget=f"{budget_bytes}B"), plain=plain, wrap=wrap, around=around)
        except BudgetInfeasibleError as error:
            if error.floor_bytes <= budget_bytes:
                raise
            budget_bytes = error.floor_bytes
        clean()  # of the training that ended, which would count beside the next one
    raise AssertionError(f"{case.name} found no feasible budget, the last was {budget_bytes}")


def check_same(case: Case, plain: Plain, trained: Trained, *, around: Around = nullcontext) -> None:
    """Hold what a plugin's run left behind against plain training, byte by byte.

    A difference counts only if plain training itself repeats to the bit; where it does not, the test is skipped and
    says where.
    """
    found = differences(plain.outcome, trained.outcome)
    for _ in range(NUM_DOUBTS if found else 0):
        repeated = differences(plain.outcome, train_plainly(case, around=around).outcome, limit=1)
        if repeated:
            pytest.skip(f"plain training of {case.name} does not repeat itself: {repeated[0]}")
    assert not found, "outcomes differ:\n  " + "\n  ".join(found)


def check_planned(case: Case, trained: Trained) -> None:
    """Hold a static case to its word: planned in the end, unless replays were found to differ meanwhile."""
    assert not case.static or trained.phase == "planned" or trained.num_mismatched
