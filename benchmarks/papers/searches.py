"""What our planner reaches: floors, largest batches, largest depths and step times within a budget.

A batch or depth fits if the planner's floor, the smallest peak of the whole step that it can promise, is within the
memory of the GPU. What a floor costs in time is another matter: where a figure is about time, a plan is made.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from benchmarks.papers.captures import Family
from lightning_offload.cli.batch_search import largest_within
from lightning_offload.graph.device_spec import DeviceSpec
from lightning_offload.graph.memory_plan import MemoryPlan
from lightning_offload.graph.step_graph import StepGraph
from lightning_offload.planning.planner import plan
from lightning_offload.planning.problem import Problem
from lightning_offload.planning.request import PlanRequest

_SHRINK = 0.995
_MAX_SHRINKS = 20
MOST = 1 << 16
"""The largest size that is looked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peaks:
    """A whole step at its two ends.

    Attributes:
        plain_bytes: Peak with everything kept.
        floor_bytes: The smallest peak that can be promised.
        floor_op: What sets it.
        floor_slowdown: How much longer that step takes, each copy waited for: 2 for twice as long.
    """

    plain_bytes: int
    floor_bytes: int
    floor_op: str
    floor_slowdown: float


def peaks(graph: StepGraph, spec: DeviceSpec) -> Peaks:
    """Return the peaks of a step."""
    request = PlanRequest(Problem(graph), spec, None)
    plain, floor = request.plain, request.floor
    return Peaks(
        plain_bytes=plain.peak_bytes,
        floor_bytes=floor.peak_bytes,
        floor_op=request.floor_op,
        floor_slowdown=floor.step_seconds / plain.step_seconds,
    )


def largest_batch(family: Family, budget_bytes: int) -> int:
    """Return the largest batch whose floor is within a budget, confirmed by a recording of that very step."""

    @functools.cache
    def floor(size: int) -> int:
        return peaks(family.at(size), family.spec).floor_bytes

    found = largest_within(floor, budget_bytes, MOST)
    for _ in range(_MAX_SHRINKS):
        if found == 0 or peaks(family.recorded_at(found), family.spec).floor_bytes <= budget_bytes:
            return found
        found = min(found - 1, int(found * _SHRINK))
    raise RuntimeError(f"steps recorded near batch size {found} are larger than two others had led to expect")


def largest_plain_batch(family: Family, budget_bytes: int) -> int:
    """Return the largest batch that fits with everything kept."""

    @functools.cache
    def peak(size: int) -> int:
        return PlanRequest(Problem(family.at(size)), family.spec, None).plain.peak_bytes

    return largest_within(peak, budget_bytes, MOST)


def overhead(made: MemoryPlan) -> float:
    """Return how much longer a planned step takes than one with everything kept: 0.1 for a tenth."""
    return made.predicted_step_seconds / made.plain_step_seconds - 1


def at_least(made: MemoryPlan) -> str:
    """Say what the lower bound on the step time leaves to any plan."""
    return f"no plan of this runtime adds less than {100 * (made.bound_seconds / made.plain_step_seconds - 1):.1f}%"


def planned(graph: StepGraph, spec: DeviceSpec, budget_bytes: int | None) -> MemoryPlan:
    """Return our plan for a step."""
    return plan(graph, spec, budget_bytes)
