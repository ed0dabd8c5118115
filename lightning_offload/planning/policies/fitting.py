"""Makes a plan of a policy's choice, or says by how much it does not fit.

A policy with a discipline of its own gets the copies at the times it asks for, and does not fit where that does
not. For the others the simulator chooses within the budget, and where that is too tight every copy is waited for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from lightning_offload.graph.memory_plan import Action, MemoryPlan
from lightning_offload.planning.request import PlanRequest, build_plan, describe
from lightning_offload.planning.simulator import Actions, Schedule, Timeline, simulate
from lightning_offload.planning.tiers import HostRoom, must_fit_host

Ordered = Sequence[tuple[int, Action]]
"""Actions in the order in which a policy takes them while memory is short."""

_MAX_TIGHT_TRIALS = 64
_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True, slots=True)
class SimulatedActions:
    """Actions and the step under them."""

    actions: dict[int, Action]
    timeline: Timeline


def fits(request: PlanRequest, timeline: Timeline) -> bool:
    """Whether a step is within the budget."""
    return request.budget_bytes is None or timeline.peak_bytes <= request.budget_bytes


def plan_of(
    request: PlanRequest, policy: str, timeline: Timeline, actions: Actions, no_memo: frozenset[int] = frozenset()
) -> MemoryPlan:
    """The plan of a simulated choice.

    Raises:
        BudgetInfeasibleError: It does not fit; its own peak is the floor.
    """
    if not fits(request, timeline):
        raise too_small(request, policy, timeline)
    return build_plan(request, policy, actions, timeline, no_memo)


def too_small(request: PlanRequest, policy: str, timeline: Timeline) -> Exception:
    """The error for a budget below the smallest peak that a policy has."""
    op = request.problem.graph.op_at(timeline.peak_tick)
    return request.infeasible(timeline.peak_bytes, describe(op) if op else "persistent state", policy)


def fixed_plan(
    request: PlanRequest, policy: str, actions: dict[int, Action], no_memo: frozenset[int] = frozenset()
) -> MemoryPlan:
    """The plan of a choice that no budget changes; the simulator chooses when to copy.

    Raises:
        BudgetInfeasibleError: It does not fit even where each copy is waited for.
    """
    return plan_of(request, policy, _simulate(request, actions, no_memo), actions, no_memo)


def scheduled_plan(request: PlanRequest, policy: str, actions: dict[int, Action], schedule: Schedule) -> MemoryPlan:
    """The plan of a choice with a discipline of its own.

    Raises:
        BudgetInfeasibleError: It does not fit so.
    """
    return plan_of(request, policy, simulate(request.problem, actions, request.device, schedule=schedule), actions)


def shortest_prefix(
    request: PlanRequest,
    policy: str,
    order: Ordered,
    always: Actions | None = None,
    no_memo: frozenset[int] = frozenset(),
) -> SimulatedActions:
    """Take actions in a policy's order until the step fits.

    Args:
        request: The step and its budget.
        policy: Whose order it is.
        order: Actions, the first to be taken first.
        always: Actions that are taken whatever the budget.
        no_memo: Recomputed storages that are not memoised.

    Raises:
        BudgetInfeasibleError: No prefix fits.
    """
    base = dict(always or {})

    def taken(num: int) -> SimulatedActions | None:
        actions = base | dict(order[:num])
        timeline = _simulate(request, actions, no_memo)
        return SimulatedActions(actions, timeline) if fits(request, timeline) else None

    return taken(0) or first_that_fits(1, len(order), taken) or _some_prefix(request, policy, order, base, no_memo)


def first_that_fits(
    low: int, high: int, try_: Callable[[int], _T | None], is_over: Callable[[], bool] = lambda: False
) -> _T | None:
    """What the shortest prefix gives that fits, by bisection; longer ones need not, since replays take memory too.

    Args:
        low: The least length.
        high: The greatest, which is tried first.
        try_: Gives what a prefix of a length comes to; None where it does not fit.
        is_over: Whether to stop, with the best so far.
    """
    best = try_(high)
    while low < high and not is_over():
        middle = (low + high) // 2
        found = try_(middle)
        if found is not None:
            best, high = found, middle
        else:
            low = middle + 1
    return best


def _some_prefix(
    request: PlanRequest, policy: str, order: Ordered, base: Actions, no_memo: frozenset[int]
) -> SimulatedActions:
    """Replays take memory too, so that a shorter prefix may fit where the whole order does not."""
    step = max(1, len(order) // _MAX_TIGHT_TRIALS)
    smallest: Timeline | None = None
    for num in range(len(order), -1, -step):
        actions = {**base, **dict(order[:num])}
        timeline = simulate(request.problem, actions, request.device, no_memo=no_memo, overlap=False)
        if fits(request, timeline):
            return SimulatedActions(actions, timeline)
        if smallest is None or timeline.peak_bytes < smallest.peak_bytes:
            smallest = timeline
    assert smallest is not None
    raise too_small(request, policy, smallest)


def _simulate(request: PlanRequest, actions: Actions, no_memo: frozenset[int]) -> Timeline:
    """Within the budget where that can be, waiting for each copy where it cannot."""
    limit = request.budget_bytes
    timeline = simulate(request.problem, actions, request.device, limit_bytes=limit, no_memo=no_memo)
    if not fits(request, timeline):
        tight = simulate(request.problem, actions, request.device, no_memo=no_memo, overlap=False)
        timeline = min(timeline, tight, key=lambda t: t.peak_bytes)
    return timeline


def fit_host(request: PlanRequest, storages: Iterable[int], recomputed: Iterable[int] = ()) -> list[int]:
    """Those of some storages that the host has room for if it is asked for them in this order; all where it has no end.

    Args:
        request: The step and the host.
        storages: What may be swapped.
        recomputed: All storages that may be recomputed.
    """
    limit = request.device.host_memory_bytes
    if limit is None or not must_fit_host(request.device):
        return list(storages)
    room = HostRoom(request.problem, limit, recomputed)
    return [s for s in storages if room.take(s)]


def swap(storages: Iterable[int]) -> dict[int, Action]:
    """Swap them."""
    return dict.fromkeys(storages, "swap")
