"""Trains a case once and keeps all that tests ask of it: bits, true peaks, reports, and what stays alive.

A case's budgets lie between the floor and the plain peak that an unbounded run reports.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from lightning_offload import MemoryPlugin
from lightning_offload.errors import BudgetInfeasibleError
from lightning_offload.plugins.report import Report
from tests.engine.harness import Outcome, Wrap, run
from tests.engine.live_tracker import LiveStorageTracker
from tests.zoo.case import Case
from tests.zoo.cases import BY_NAME

NUM_RETRIES = 8
"""How often a case whose graph changes may find that a new graph needs a larger budget."""


MARGIN = 1.1
"""Replays may turn out to take more than was predicted: near the floor that makes a budget infeasible by so much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Levels:
    """The smallest feasible budget of a case and the peak of its plain step."""

    floor_bytes: int
    plain_peak_bytes: int

    def budget(self, height: float) -> int:
        """The budget at a height between the floor (0) and the plain peak (1)."""
        return int(self.floor_bytes + height * (self.plain_peak_bytes - self.floor_bytes))


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The true peak of one step, the op at which it was reached, and what the plugin reported after it."""

    peak_bytes: int
    peak_op: str
    report: Report | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What a training showed.

    Attributes:
        outcome: All that it left behind, bit by bit.
        is_tracked: Whether a tracker counted live bytes.
        steps: Peaks and reports, step by step.
        live_bytes: Bytes alive after each step, without the garbage collector's help.
    """

    outcome: Outcome
    is_tracked: bool
    steps: list[Measured] = field(default_factory=list)
    live_bytes: list[int] = field(default_factory=list)

    @property
    def phase(self) -> str:
        """The phase in which the last step left the plugin."""
        report = self.steps[-1].report
        return report.phase if report is not None else ""


def train(
    case: Case,
    memory: MemoryPlugin | None = None,
    *,
    wrap: Wrap = Wrap.WHOLE,
    steps: int | None = None,
    is_tracked: bool = True,
) -> Training:
    """Train a case, under a tracker of live bytes or without one.

    The tracker is a dispatch mode. Some formulas of autograd have other last bits under one, and the runtime has
    shorter ways where its own mode is the only one: so the outcome of a tracked training is that of tracked plain
    training, and every case is trained without the tracker, too.
    """
    tracker = LiveStorageTracker()
    found = Training(outcome=Outcome(), is_tracked=is_tracked)

    @contextmanager
    def around() -> Iterator[None]:
        with tracker.window() as window:
            yield
        report = memory.report(of_last=True) if memory is not None else None
        found.steps.append(Measured(peak_bytes=window.peak_bytes, peak_op=window.peak_op, report=report))

    was_enabled = gc.isenabled()
    gc.disable()
    try:
        with tracker if is_tracked else nullcontext():
            outcome = run(
                case,
                memory=memory,
                wrap=wrap,
                steps=steps,
                around=around,
                on_start=lambda job: tracker.register(job.model, *job.optimizers),
                after_step=lambda _: found.live_bytes.append(tracker.live_bytes),
            )
    finally:
        if was_enabled:
            gc.enable()
    found.outcome.values.update(outcome.values)
    return found


@functools.lru_cache(maxsize=8)
def trained_plainly(name: str) -> Training:
    """A case of the zoo under plain PyTorch, tracked."""
    return train(BY_NAME[name])


@functools.lru_cache(maxsize=8)
def trained_swapping(name: str, wrap: Wrap = Wrap.WHOLE) -> Training:
    """A case of the zoo without a budget, everything swapped out, tracked."""
    return train(BY_NAME[name], MemoryPlugin(budget=None, policy="all-swap"), wrap=wrap)


@functools.cache
def levels(name: str, wrap: Wrap = Wrap.WHOLE) -> Levels:
    """Between what a case's budgets lie: the highest floor and peak of any of its steps."""
    reports = [step.report for step in trained_swapping(name, wrap).steps]
    floors = [report.floor_bytes or 0 for report in reports if report is not None]
    peaks = [report.plain_peak_bytes or 0 for report in reports if report is not None]
    found = Levels(floor_bytes=max(floors), plain_peak_bytes=max(peaks))
    assert 0 < found.floor_bytes <= found.plain_peak_bytes, found
    return found


@functools.lru_cache(maxsize=8)
def plain_outcome(name: str) -> Outcome:
    """What plain PyTorch leaves behind."""
    return run(BY_NAME[name])


def train_within(
    case: Case, budget_bytes: int, wrap: Wrap = Wrap.WHOLE, *, is_tracked: bool = False, **keywords: Any
) -> tuple[Training, int]:
    """Train a case within a budget; one whose graph changes, or whose state grows, may raise it to what is needed then.

    Args:
        case: What to train.
        budget_bytes: The budget at first.
        wrap: Which part of a step the plugin surrounds.
        is_tracked: Whether a tracker counts live bytes.
        keywords: Of the plugin.

    Returns:
        The training, and its budget.
    """
    for _ in range(NUM_RETRIES):
        try:
            memory = MemoryPlugin(budget=budget_bytes, **keywords)
            return train(case, memory, wrap=wrap, is_tracked=is_tracked), budget_bytes
        except BudgetInfeasibleError as error:
            budget_bytes = _raised(case, budget_bytes, error)
    raise AssertionError(f"{case.name} found no feasible budget, the last was {budget_bytes}")


def _raised(case: Case, budget_bytes: int, error: BudgetInfeasibleError) -> int:
    """The budget that an infeasible one is raised to, where that is to be expected."""
    if case.static and not case.grows and error.floor_bytes > MARGIN * budget_bytes:
        raise error
    if error.floor_bytes <= budget_bytes:
        raise AssertionError(f"{budget_bytes} is said to be infeasible and feasible") from error
    return error.floor_bytes
