"""Makes the plan for a kind of step: with its margins, by its family, or as the user gave it."""

from __future__ import annotations

import dataclasses
import functools
import logging

from lightning_offload.errors import BudgetInfeasibleError, PlanError
from lightning_offload.graph.device_spec import DeviceSpec
from lightning_offload.graph.memory_plan import MemoryPlan
from lightning_offload.graph.step_graph import StepGraph
from lightning_offload.planning.planner import Make, beside, plan_with_margin, plan_without_ops
from lightning_offload.planning.problem import Problem
from lightning_offload.planning.trace import simulate_plan
from lightning_offload.plugins.plan_entry import PlanEntry
from lightning_offload.runtime.program import compile_plan
from lightning_offload.units import format_bytes

_log = logging.getLogger(__name__)


def make_plan(
    kind: PlanEntry,
    device: DeviceSpec,
    budget_bytes: int | None,
    policy: str,
    keep: tuple[str, ...],
    given: MemoryPlan | None,
) -> None:
    """Make the plan for a kind of step, or take the given one where that is within the budget.

    Args:
        kind: The kind of step; its plan comes into force.
        device: What is planned for.
        budget_bytes: Peak of live device bytes allowed, None for no limit.
        policy: The policy.
        keep: Patterns of module names whose saved tensors stay on the device.
        given: The plan that the user gave for it; None for none.

    Raises:
        BudgetInfeasibleError: The budget is below the floor.
        PlanError: The given plan is for another graph, or cannot be carried out.
    """
    assert kind.graph is not None
    kind.spec = device
    kind.corrections.begin_plan()
    kind.begin_anew()
    kind.seen_by_op, kind.superseded = (), None
    if given is not None and not kind.aligns:
        found = _given_within(kind, given, device, budget_bytes)
        if found is not None:
            kind.program = compile_plan(kind.graph, found, is_given=True)
            return
    _plan_within(kind, device, budget_bytes, policy, keep)


def _given_within(
    kind: PlanEntry, given: MemoryPlan, device: DeviceSpec, budget_bytes: int | None
) -> MemoryPlan | None:
    """The given plan with what is predicted of it here; None where that is beyond the budget.

    Raises:
        PlanError: It cannot be carried out.
    """
    assert kind.graph is not None
    given.check(kind.graph)
    if any(d.storage in kind.mismatched for d in given.decisions if d.action == "recompute"):
        return None
    peak_bytes = simulate_plan(Problem(kind.graph), given.decisions, device).peak_bytes + kind.shortfall_bytes
    limit_bytes = min((n for n in (budget_bytes, kind.usable_bytes) if n is not None), default=None)
    if limit_bytes is not None and peak_bytes > limit_bytes:
        _log.info(
            "the given plan would need %s with what is on the device here, where %s may be used: its step is "
            "planned anew", format_bytes(peak_bytes), format_bytes(limit_bytes),
        )  # fmt: skip
        return None
    return beside(given, peak_bytes - given.predicted_peak_bytes)


def _plan_within(
    kind: PlanEntry, device: DeviceSpec, budget_bytes: int | None, policy: str, keep: tuple[str, ...]
) -> None:
    assert kind.graph is not None

    keep_storages = kind.graph.storages_saved_in(keep) | frozenset(kind.mismatched)
    plan_it = _plan_of_family(kind, keep_storages) if policy == "auto" else None
    if kind.aligns:
        plan_it = functools.partial(plan_without_ops, policy=policy, keep=keep_storages)
    if kind.family is not None:
        kind.shortfall_bytes = kind.family.shortfall_bytes

    def make(margin_bytes: int, *, must_fit: bool) -> MemoryPlan:
        assert kind.graph is not None
        return plan_with_margin(
            kind.graph if plan_it is not None else kind.shown_graph,
            device,
            budget_bytes,
            usable_bytes=kind.usable_bytes,
            shortfall_bytes=margin_bytes,
            must_fit=must_fit,
            make=plan_it,
            mode_seconds=kind.corrections.mode_seconds,
            policy=policy,
            keep=keep_storages,
            is_provisional=kind.phase != "planned",
        )

    try:
        plan = make(kind.margin_bytes, must_fit=True)
        if kind.headroom_bytes:  # which is given up where there is no room for it: a smaller budget does
            plan = dataclasses.replace(plan, floor_bytes=plan.floor_bytes - kind.headroom_bytes)
    except BudgetInfeasibleError as error:
        without_margin_bytes = error.floor_bytes - kind.margin_bytes
        needed_bytes = without_margin_bytes + kind.shortfall_bytes
        is_margin_too_much = budget_bytes is not None and without_margin_bytes <= budget_bytes
        is_accepted = (kind.is_over and is_margin_too_much) or kind.is_slightly_over(needed_bytes, budget_bytes)
        if not (kind.headroom_bytes or is_accepted):
            raise
        kind.headroom_bytes = 0
        plan = make(kind.shortfall_bytes, must_fit=not is_accepted)
    if budget_bytes is not None and kind.is_over and plan.predicted_peak_bytes > budget_bytes:
        kind.warn(budget_bytes, plan.predicted_peak_bytes)
    kind.must_search = kind.changes.is_retried = False
    forms = kind.forms if kind.aligns else None
    try:
        kind.program = compile_plan(
            kind.graph, plan, is_bound=kind.family is not None, forms=forms, is_given=kind.is_step_given
        )
    except PlanError as error:
        if not kind.aligns:
            raise
        raise BudgetInfeasibleError(  # a policy of its own mind: no training that ran so far ends by that
            f"the policy {plan.policy!r} has no plan that steps of changing structure can follow: {error}",
            budget_bytes=budget_bytes or 0,
            floor_bytes=plan.floor_bytes,
            op=plan.floor_op,
        ) from None


def _plan_of_family(kind: PlanEntry, keep: frozenset[int]) -> Make | None:
    """What plans a derived step; None for one that was recorded."""
    if kind.planner is None or kind.figures is None:
        return None
    planner, figures, is_thorough = kind.planner.keeping(keep), kind.figures, kind.must_search

    def make(graph: StepGraph, device: DeviceSpec, budget_bytes: int | None) -> MemoryPlan:
        return planner.plan(graph, figures, device, budget_bytes, is_thorough=is_thorough)

    return make
