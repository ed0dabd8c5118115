"""Where a case's budgets lie: between the floor and the plain peak that a first, unbounded run reports."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from lightning_offload import MemoryPlugin
from lightning_offload.errors import BudgetInfeasibleError
from tests.engine.harness import Outcome, Wrap, run
from tests.zoo.case import Case
from tests.zoo.cases import BY_NAME

NUM_PROBING_STEPS = 4
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


@functools.lru_cache(maxsize=8)
def levels(name: str, wrap: Wrap = Wrap.WHOLE) -> Levels:
    """Probe a case of the zoo: the highest floor and peak of any of its steps."""
    case = BY_NAME[name]
    memory = MemoryPlugin(budget=None, policy="all-swap")
    floors: list[int] = []
    peaks: list[int] = []

    @contextmanager
    def around() -> Iterator[None]:
        yield
        report = memory.report()
        floors.append(report.floor_bytes or 0)
        peaks.append(report.plain_peak_bytes or 0)

    steps = NUM_PROBING_STEPS if case.static and not case.grows else case.steps
    run(case, memory=memory, wrap=wrap, around=around, steps=steps, record=False)
    found = Levels(floor_bytes=max(floors), plain_peak_bytes=max(peaks))
    assert 0 < found.floor_bytes <= found.plain_peak_bytes, found
    return found


@functools.lru_cache(maxsize=8)
def plain_outcome(name: str) -> Outcome:
    """What plain PyTorch leaves behind."""
    return run(BY_NAME[name])


def run_within(case: Case, budget_bytes: int, wrap: Wrap) -> tuple[Outcome, str]:
    """Run a case within a budget; one whose graph changes, or whose state grows, may raise it to what is needed then.

    Returns:
        The outcome, and the phase in which the last step left the plugin.
    """
    for _ in range(NUM_RETRIES):
        try:
            return run_with(case, MemoryPlugin(budget=budget_bytes), wrap)
        except BudgetInfeasibleError as error:
            if case.static and not case.grows and error.floor_bytes > MARGIN * budget_bytes:
                raise
            if error.floor_bytes <= budget_bytes:
                raise AssertionError(f"{budget_bytes} is said to be infeasible and feasible") from error
            budget_bytes = error.floor_bytes
    raise AssertionError(f"{case.name} found no feasible budget, the last was {budget_bytes}")


def run_with(case: Case, memory: MemoryPlugin, wrap: Wrap) -> tuple[Outcome, str]:
    """Run a case under a plugin and return the outcome and the last phase."""
    phases: list[str] = []
    outcome = run(case, memory=memory, wrap=wrap, after_step=lambda _: phases.append(memory.report().phase))
    return outcome, phases[-1]
