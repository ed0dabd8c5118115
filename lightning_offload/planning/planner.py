"""Plans a step by a policy's name.

``auto`` is our own planner. ``keep-all``, ``all-swap`` and ``all-recompute`` are fixed choices, the others are
published systems (:mod:`~lightning_offload.planning.policies`).
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from collections.abc import Callable
from typing import Any

from lightning_offload.errors import BudgetInfeasibleError, PolicyError
from lightning_offload.graph.device_spec import DeviceSpec
from lightning_offload.graph.hook_points import hooks_before_ops
from lightning_offload.graph.host_layout import plan_layout
from lightning_offload.graph.memory_plan import AT_PACK, Decision, MemoryPlan
from lightning_offload.graph.step_graph import StepGraph, by_structure
from lightning_offload.planning.auto import auto
from lightning_offload.planning.policies import PUBLISHED, Policy
from lightning_offload.planning.policies.fixed import all_recompute, all_swap, keep_all
from lightning_offload.planning.problem import Problem
from lightning_offload.planning.request import PlanRequest, choice_of, decisions_of
from lightning_offload.planning.trace import simulate_plan

POLICIES: dict[str, Policy] = {
    "auto": auto,
    "keep-all": keep_all,
    "all-swap": all_swap,
    "all-recompute": all_recompute,
    **PUBLISHED,
}
_MAX_RETRIES = 3  # with less to plan for, where a plan takes more than was asked for
_OF_ALL_PLANS = ("graph_digest", "floor_bytes", "floor_op", "bound_seconds")
_LITTLE_LONGER = 1.02  # times the predicted step: what a plan may take more so that its steps need no dispatch mode
_MOST_MODE_SECONDS = 100e-6  # on a slow host
_LAUNCH_SECONDS = 9e-6  # what an op costs the host in plain PyTorch


Make = Callable[[StepGraph, DeviceSpec, int | None], MemoryPlan]
"""Plans a step on a device within a budget."""


def check_policy(name: str) -> str:
    """The name of a policy, checked.

    Raises:
        PolicyError: There is none of that name.
    """
    if not isinstance(name, str) or name not in POLICIES:
        raise PolicyError(f"unknown policy {name!r}: choose one of {', '.join(map(repr, POLICIES))}")
    return name


def plan(
    graph: StepGraph,
    device: DeviceSpec,
    budget_bytes: int | None,
    *,
    policy: str = "auto",
    keep: frozenset[int] = frozenset(),
    seconds: float | None = None,
    seed: int = 0,
    is_provisional: bool = False,
    is_hasty: bool = False,
) -> MemoryPlan:
    """Plan a step.

    Args:
        graph: The recorded step.
        device: Where it runs.
        budget_bytes: Peak of live device bytes allowed, None for no limit.
        policy: Who plans.
        keep: Storages that must stay on the device.
        seconds: When to stop searching, roughly; by default a search ends by itself, after an effort that does not
            depend on the machine's speed.
        seed: Of what a search does at random.
        is_provisional: Whether the plan is soon made again, so that little effort is enough.
        is_hasty: Whether a step waits for it: its bound is the plain step's then.

    Raises:
        PolicyError: No such policy.
        BudgetInfeasibleError: The policy cannot meet the budget; names the smallest it can meet.
    """
    make, problem = POLICIES[check_policy(policy)], Problem(graph, keep)
    problem.is_urgent = is_hasty
    made = make(PlanRequest(problem, device, budget_bytes, seconds, seed, is_provisional, is_hasty))
    limit = planned_for = device.host_memory_bytes
    for _ in range(_MAX_RETRIES):
        excess = _host_excess(graph, made, limit)
        if planned_for is None or excess <= 0:
            break
        planned_for = max(0, planned_for - excess)
        try:
            smaller = dataclasses.replace(device, host_memory_bytes=planned_for)
            made = make(PlanRequest(problem, smaller, budget_bytes, seconds, seed, is_provisional, is_hasty))
        except BudgetInfeasibleError:
            break  # offsets are hints: what has no place of its own may still find one
    return made


def plan_with_margin(
    graph: StepGraph,
    device: DeviceSpec,
    budget_bytes: int | None,
    *,
    usable_bytes: int | None,
    shortfall_bytes: int,
    must_fit: bool,
    make: Make | None = None,
    mode_seconds: float | None = None,
    **how: Any,
) -> MemoryPlan:
    """Plan a step so that its measured peak is within the budget, by a margin for what a plan does not foresee.

    The margin is counted as what is on the device beside the step, so it is in the predicted peak, and in the smallest
    feasible budget that an error tells.

    Args:
        graph: The step.
        device: Where it runs.
        budget_bytes: Peak of live device bytes allowed, None for no limit.
        usable_bytes: Device memory that there turned out to be, where that is less.
        shortfall_bytes: By how much measured peaks exceeded predicted ones.
        must_fit: Whether a budget that cannot be met raises; the plan with the lowest peak is made otherwise.
        make: Plans a step within a budget; by default :func:`plan` does, and spares it the dispatch mode.
        mode_seconds: By how much that lengthens a step; by default as it is known of other steps.
        how: Further keywords of :func:`plan`.

    Raises:
        BudgetInfeasibleError: The budget is below the floor.
    """
    counted = dataclasses.replace(graph, extra_bytes=graph.extra_bytes + shortfall_bytes)
    limits = [limit for limit in (budget_bytes, usable_bytes) if limit is not None]
    try:
        limit = min(limits, default=None)
        if make is not None:
            made = make(counted, device, limit)
        else:
            made = _plan_sparing_the_mode(counted, device, limit, mode_seconds, **how)
    except BudgetInfeasibleError as error:
        is_within_budget = budget_bytes is None or (error.floor_bytes <= budget_bytes and min(limits) < budget_bytes)
        if must_fit and not is_within_budget:
            raise
        least = error.floor_bytes
        made = plan(counted, device, least, **how) if make is None else make(counted, device, least)
    plain_peak_bytes = made.plain_peak_bytes - shortfall_bytes
    return dataclasses.replace(made, budget_bytes=budget_bytes, plain_peak_bytes=plain_peak_bytes)


def _plan_sparing_the_mode(
    graph: StepGraph, device: DeviceSpec, budget_bytes: int | None, mode_seconds: float | None, **how: Any
) -> MemoryPlan:
    """Plan a step, and spare it the dispatch mode where that costs less than the mode does.

    Raises:
        BudgetInfeasibleError: The budget is below the floor.
    """
    made = plan(graph, device, budget_bytes, **how)
    if how.get("is_provisional"):
        return made
    problem = Problem(graph, how.get("keep", frozenset()))

    def quiet() -> MemoryPlan | None:
        return _without_recompute(graph, device, budget_bytes, **how) if how.get("policy", "auto") == "auto" else None

    return sparing_the_mode(problem, made, device, budget_bytes, quiet, mode_seconds)


def sparing_the_mode(
    problem: Problem,
    made: MemoryPlan,
    device: DeviceSpec,
    budget_bytes: int | None,
    find_quiet: Callable[[], MemoryPlan | None],
    mode_seconds: float | None = None,
) -> MemoryPlan:
    """A plan, or one under which the step needs no dispatch mode, where that costs less than the mode does.

    A step needs no mode whose plan recomputes nothing and releases device copies at packs and unpacks alone. Backward
    needs none where nothing is released between its unpacks. Plans do not count the host's time, so it is weighed here.

    Args:
        problem: The step.
        made: The plan.
        device: Where it runs.
        budget_bytes: The budget.
        find_quiet: Finds a plan that recomputes nothing, if there is one.
        mode_seconds: By how much the mode lengthens a step; by default as it is known of other steps.
    """
    little_longer = _LITTLE_LONGER * made.predicted_step_seconds
    if not any(decision.action == "recompute" for decision in made.decisions):
        return _with_releases_at_hooks(problem, made, device, budget_bytes, little_longer) or made
    may_take = made.predicted_step_seconds + (_mode_seconds(problem, device) if mode_seconds is None else mode_seconds)
    if may_take > max(little_longer, least_quiet_seconds(made, device, budget_bytes)):
        found = find_quiet()
        if found is not None and found.predicted_step_seconds <= may_take:
            bounds = {name: getattr(made, name) for name in _OF_ALL_PLANS}
            bare = dataclasses.replace(found, **bounds)
            quiet = _with_releases_at_hooks(problem, bare, device, budget_bytes, may_take)
            if quiet is not None:
                return quiet
    spared = _with_releases_at_hooks(problem, made, device, budget_bytes, little_longer, in_backward_alone=True)
    return spared or made


def least_quiet_seconds(made: MemoryPlan, device: DeviceSpec, budget_bytes: int | None) -> float:
    """About what a plan takes at least that recomputes nothing: none is looked for where that is too much.

    What is beyond the budget where the plain step has its peak is away by then, and comes back later, unless it is
    saved and never read.

    Args:
        made: A plan for the step.
        device: Where it runs.
        budget_bytes: The budget.
    """
    excess_bytes = max(0, made.plain_peak_bytes - budget_bytes) if budget_bytes is not None else 0
    return excess_bytes / device.d2h_bytes_per_second + excess_bytes / device.h2d_bytes_per_second


def _with_releases_at_hooks(
    problem: Problem,
    made: MemoryPlan,
    device: DeviceSpec,
    budget_bytes: int | None,
    may_take: float,
    *,
    in_backward_alone: bool = False,
) -> MemoryPlan | None:
    """A plan with releases moved to packs and unpacks; None where none is within the budget and takes no longer."""
    limit_bytes = made.predicted_peak_bytes if budget_bytes is None else budget_bytes
    for moved in (_at_hooks(problem, made, device, earlier, in_backward_alone) for earlier in (True, False)):
        if moved.predicted_step_seconds <= may_take and moved.predicted_peak_bytes <= limit_bytes:
            return moved
    return None


def _mode_seconds(problem: Problem, device: DeviceSpec) -> float:
    """By how much a dispatch mode around forward lengthens a step.

    Where the host only launches, by what it then takes longer than the device.
    """
    is_forward = [op.phase == "forward" for op in problem.graph.ops]
    num_ops = sum(is_forward)
    if device.kind == "cpu":
        return device.seeing_seconds * num_ops
    return max(0.0, (_LAUNCH_SECONDS + device.seeing_seconds) * num_ops - float(problem.op_seconds[is_forward].sum()))


def mode_share(graph: StepGraph, waited_seconds: float) -> float:
    """How much of what a device waited for its host in forward a dispatch mode may have cost, in seconds.

    Not what launching the ops takes without it, nor more than a mode was ever seen to cost: the program has work of its
    own for the host.

    Args:
        graph: The step.
        waited_seconds: What the device waited.
    """
    seconds = [op.seconds for op in graph.ops if op.phase == "forward"]
    without = max(0.0, _LAUNCH_SECONDS * len(seconds) - sum(seconds))
    return min(max(0.0, waited_seconds - without), _MOST_MODE_SECONDS * len(seconds))


def _without_recompute(graph: StepGraph, device: DeviceSpec, budget_bytes: int | None, **how: Any) -> MemoryPlan | None:
    """A plan that recomputes nothing; None where none meets the budget."""
    try:
        return plan(_unreplayable(graph), device, budget_bytes, **how)
    except BudgetInfeasibleError:
        return None


def _unreplayable(graph: StepGraph) -> StepGraph:
    """A step of which nothing can be recomputed."""
    return dataclasses.replace(graph, ops=tuple(dataclasses.replace(op, replayable=False) for op in graph.ops))


def plan_without_ops(graph: StepGraph, device: DeviceSpec, budget_bytes: int | None, **how: Any) -> MemoryPlan:
    """Plan a step whose ops nobody follows: nothing is recomputed, and copies are released at packs and unpacks alone.

    Args:
        graph: The step.
        device: Where it runs.
        budget_bytes: Peak of live device bytes allowed, None for no limit.
        how: Further keywords of :func:`plan`.

    Raises:
        BudgetInfeasibleError: No such plan is within the budget.
    """
    problem, limit_bytes = Problem(graph, how.get("keep", frozenset())), budget_bytes
    for _ in range(_MAX_RETRIES):
        made = _after_their_ops(problem, plan(_unreplayable(graph), device, limit_bytes, **how), device)
        tried = [_off_ops(problem, _at_hooks(problem, made, device, earlier)) for earlier in (True, False)]
        if budget_bytes is None or limit_bytes is None:
            return min(tried, key=lambda m: m.predicted_step_seconds)
        fitting = [m for m in tried if m.predicted_peak_bytes <= budget_bytes]
        if fitting:
            return min(fitting, key=lambda m: m.predicted_step_seconds)
        floor_bytes = min(m.predicted_peak_bytes for m in tried)
        limit_bytes = max(made.floor_bytes, limit_bytes - (floor_bytes - budget_bytes))
    assert budget_bytes is not None
    raise BudgetInfeasibleError(
        f"the budget of {budget_bytes} bytes is below {floor_bytes}, the smallest peak found where device copies are "
        "released at packs and unpacks alone",
        budget_bytes=budget_bytes,
        floor_bytes=floor_bytes,
        op=made.floor_op,
    )


def _off_ops(problem: Problem, made: MemoryPlan) -> MemoryPlan:
    """A plan without releases between hooks: the simulation ends a stay at the unpack, if that comes before the hook.

    Such a storage stays where it is until then, so its release is put off to the hook.
    """
    _, following = _hooks_near_ops(problem.graph)
    decisions = (
        d if d.release_op == AT_PACK else dataclasses.replace(d, release_op=following[d.release_op])
        for d in made.decisions
    )
    return dataclasses.replace(made, decisions=tuple(decisions))


def _after_their_ops(problem: Problem, made: MemoryPlan, device: DeviceSpec) -> MemoryPlan:
    """A plan with what is released at its pack released once the op that saves it is done, at the next hook."""
    _, following = _hooks_near_ops(problem.graph)
    ticks = problem.op_ticks.tolist()

    def moved(decision: Decision) -> Decision:
        if decision.action != "swap" or decision.release_op != AT_PACK:
            return decision
        after = min(bisect_right(ticks, problem.candidates[decision.storage].pack_tick) + 1, len(ticks))
        return dataclasses.replace(decision, release_op=following[after])

    return _simulated(problem, made, list(map(moved, made.decisions)), device)


def _at_hooks(
    problem: Problem, made: MemoryPlan, device: DeviceSpec, earlier: bool, in_backward_alone: bool = False
) -> MemoryPlan:
    """A plan with each release moved to where a pack or an unpack comes before the op.

    Args:
        problem: The step.
        made: The plan.
        device: Where it runs.
        earlier: Whether releases move to an op before theirs, and compute waits for copies; to a later one otherwise.
        in_backward_alone: Whether those of forward stay where they are.
    """
    moved, ops = _hooks_near_ops(problem.graph)[not earlier], problem.graph.ops

    def at_a_hook(decision: Decision) -> Decision:
        op = decision.release_op
        stays = in_backward_alone and not (op < len(ops) and ops[op].phase == "backward")
        if op == AT_PACK or moved[op] == op or stays:
            return decision
        return dataclasses.replace(decision, release_op=moved[op])

    decisions = list(map(at_a_hook, made.decisions))
    return _simulated(problem, made, decisions, device)


@by_structure
def _hooks_near_ops(graph: StepGraph) -> tuple[list[int], list[int]]:
    """By op: the op before which the last pack or unpack comes that is not after it, and the first not before it."""
    hooks = hooks_before_ops(graph)
    num_ops = len(hooks)
    before, after = [num_ops] * (num_ops + 1), [num_ops] * (num_ops + 1)
    for index in range(num_ops):
        before[index] = index if hooks[index] is not None else (before[index - 1] if index else AT_PACK)
    for index in reversed(range(num_ops)):
        after[index] = index if hooks[index] is not None else after[index + 1]
    return before, after


def _simulated(problem: Problem, made: MemoryPlan, decisions: list[Decision], device: DeviceSpec) -> MemoryPlan:
    """A plan with other moments of its releases."""
    if tuple(decisions) == made.decisions:
        return made
    timeline = simulate_plan(problem, decisions, device)
    actions, no_memo = choice_of(decisions)
    return dataclasses.replace(
        made,
        decisions=decisions_of(problem, actions, timeline, no_memo),
        predicted_peak_bytes=timeline.peak_bytes,
        predicted_step_seconds=timeline.step_seconds,
        predicted_stall_seconds=timeline.stall_seconds,
        predicted_host_bytes=timeline.host_peak_bytes,
        predicted_disk_bytes=timeline.disk_peak_bytes,
    )


def with_margin(made: MemoryPlan, num_bytes: int) -> MemoryPlan:
    """The same plan beside so many bytes more, or fewer, that are on the device all the time."""
    return dataclasses.replace(
        made,
        floor_bytes=made.floor_bytes + num_bytes,
        plain_peak_bytes=made.plain_peak_bytes + num_bytes,
        predicted_peak_bytes=made.predicted_peak_bytes + num_bytes,
    )


def _host_excess(graph: StepGraph, made: MemoryPlan, limit_bytes: int | None) -> int:
    """By how much a plan's layout on the host is larger than it may be: stays that do not nest leave gaps."""
    if limit_bytes is None or made.predicted_host_bytes == 0:
        return 0
    return plan_layout(graph, made).tier_bytes["host"] - limit_bytes
