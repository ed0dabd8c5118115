"""What steps under a plan showed, and what becomes of the plan: the times, the peak, and whether the device had room.

A measured peak beyond the predicted one is a margin of the plans to come, or memory of the op at which it was seen
twice. Steps that take longer than the plan said, devices that run out of memory, and plans made in haste whose steps
have lost more than a search takes have the next step planned anew. Nothing here plans: a kind of step whose plan is
given up has none until its next step begins.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence

from lightning_offload.capture.timing import OpTimes, retime, scaled
from lightning_offload.planning.planner import beside, mode_share
from lightning_offload.planning.scaling_laws import Point
from lightning_offload.plugins.pace import Halves, LaunchTimes
from lightning_offload.plugins.plan_entry import PlanEntry
from lightning_offload.plugins.replanning import with_unforeseen
from lightning_offload.units import format_bytes

_log = logging.getLogger(__name__)
_OF_ANOTHER_PLAN = 4  # what a plan did not foresee may be by a quarter more under another one
_TIGHTER = 0.9  # of the peak that a device had no room for
_WORTH = 0.1  # of what plans cost: about what a thorough search takes off


def take_measured(kind: PlanEntry, times: OpTimes, bytes_by_op: Sequence[int] = ()) -> None:
    """Take over what a step under the plan showed; its peaks were noted before.

    Args:
        kind: The kind of step.
        times: Of its ops.
        bytes_by_op: The peak between the op before and each; empty where that was not counted.
    """
    assert kind.graph is not None
    assert kind.plan is not None
    kind.graph = retime(kind.graph, times)
    if kind.phase == "verifying":
        kind.phase, kind.seen_by_op = "measuring", tuple(bytes_by_op)
    elif kind.phase == "measuring":
        kind.phase = "planned"
        unforeseen_bytes, known_bytes = _unforeseen_bytes(kind), kind.shortfall_bytes
        if not _is_final(kind, unforeseen_bytes):
            _take_over_unforeseen(kind, bytes_by_op)
            kind.program = None
        elif kind.program is not None:  # what it keeps stays; its figures are those of the step as it was seen
            kind.shortfall_bytes = unforeseen_bytes
            kind.program = dataclasses.replace(
                kind.program, plan=beside(kind.program.plan, unforeseen_bytes - known_bytes)
            )


def check_peak(kind: PlanEntry, budget_bytes: int | None, bytes_by_op: Sequence[int] = ()) -> None:
    """Plan anew where a step under the final plan was measured above the budget; tell of one without a plan.

    Args:
        kind: The kind of step.
        budget_bytes: The budget.
        bytes_by_op: The peak between the op before and each; empty where that was not counted.
    """
    measured = kind.measured_peak_bytes
    if kind.family is not None and kind.plan is not None:  # others of it may be closer to the budget
        kind.family.shortfall_bytes = max(kind.family.shortfall_bytes, _unforeseen_bytes(kind))
    if kind.aligns and kind.plan is not None:
        needed_bytes = _unforeseen_bytes(kind)
        if kind.spans_sizes:  # those of other sizes may need more yet
            needed_bytes += needed_bytes // _OF_ANOTHER_PLAN
        _widen_margin(kind, needed_bytes - kind.shortfall_bytes, budget_bytes)
        return
    if budget_bytes is None or measured is None or measured <= budget_bytes:
        return
    if kind.plan is None:
        kind.warn(budget_bytes, measured)
    elif _unforeseen_bytes(kind) > kind.shortfall_bytes:
        _take_over_unforeseen(kind, bytes_by_op)
        kind.is_over = True
        kind.superseded, kind.program = kind.plan, None


def _widen_margin(kind: PlanEntry, more_bytes: int, budget_bytes: int | None) -> None:
    """A step of another structure needed more than foreseen, as others may: plan anew where that does not fit."""
    assert kind.program is not None
    assert kind.plan is not None
    if more_bytes <= 0:
        return
    if budget_bytes is None or kind.plan.predicted_peak_bytes + more_bytes <= budget_bytes:
        kind.shortfall_bytes += more_bytes
        kind.program = dataclasses.replace(kind.program, plan=beside(kind.plan, more_bytes))
    else:
        kind.shortfall_bytes += more_bytes + more_bytes // _OF_ANOTHER_PLAN
        kind.superseded, kind.program = kind.plan, None
    if kind.spans_sizes:
        kind.changes.note_margin(kind.shortfall_bytes, kind.size)


def _unforeseen_bytes(kind: PlanEntry) -> int:
    """By how much the last measured peak exceeded what was predicted for it, without a margin."""
    assert kind.plan is not None
    if kind.measured_peak_bytes is None:
        return 0
    measured = kind.measured_peak_bytes
    foreseen = kind.plan.predicted_peak_bytes - kind.margin_bytes
    if kind.derived is not None and kind.derived.actual != kind.derived.point:
        foreseen = _foreseen_at(kind, kind.derived.actual)
    elif kind.spans_sizes and kind.graph is not None:  # those that are as large as the plan is for need more
        larger = max(0.0, kind.size / kind.changes.variants.size_of(kind.given) - 1)
        measured += int(larger * kind.varying_share * max(0, measured - kind.graph.persistent_bytes))
    return max(0, measured - foreseen)


def _foreseen_at(kind: PlanEntry, point: Point) -> int:
    """The predicted peak of the last step, which was smaller than what the plan is for, without a margin."""
    assert kind.graph is not None
    assert kind.plan is not None
    assert kind.planner is not None
    assert kind.spec is not None
    figures = kind.planner.model.figures_at(point)
    given = {name: getattr(kind.graph, name) for name in ("extra_bytes", "old_gradient_bytes", "accumulated_bytes")}
    graph = dataclasses.replace(kind.planner.model.sized(figures), **given)
    return kind.planner.peak_bytes(kind.plan, graph, figures, kind.spec)


def _take_over_unforeseen(kind: PlanEntry, bytes_by_op: Sequence[int]) -> None:
    """Note by how much a measured peak exceeded what was predicted, and where memory is that the graph lacks."""
    assert kind.graph is not None
    assert kind.plan is not None
    kind.shortfall_bytes = _unforeseen_bytes(kind)
    if kind.family is not None:
        kind.family.shortfall_bytes = max(kind.family.shortfall_bytes, kind.shortfall_bytes)
        return
    if kind.aligns:  # its ops are not those of the graph
        return
    before, kind.seen_by_op = kind.seen_by_op, tuple(bytes_by_op)
    is_seen_twice = len(before) == len(bytes_by_op) > 0  # once may be by chance: a copy that was late
    if kind.shortfall_bytes and is_seen_twice and kind.spec is not None and kind.measured_peak_bytes is not None:
        kind.graph, kind.shortfall_bytes = with_unforeseen(
            kind.graph, kind.plan, kind.spec, kind.measured_peak_bytes, tuple(map(min, before, bytes_by_op))
        )


def _is_final(kind: PlanEntry, unforeseen_bytes: int) -> bool:
    """Whether nothing measured can change the plan: one that keeps everything, and fits."""
    plan = kind.plan
    if plan is None or plan.decisions:
        return False
    return plan.budget_bytes is None or plan.predicted_peak_bytes + unforeseen_bytes <= plan.budget_bytes


def compare(
    kind: PlanEntry,
    step_seconds: float,
    stall_seconds: float,
    launched: LaunchTimes | None = None,
    *,
    is_link_slower: bool,
    is_link_faster: bool = False,
) -> None:
    """Plan again if planned steps show that links, compute or the host are not what the plan counted on.

    That is done a few times at most.

    Args:
        kind: The kind of step.
        step_seconds: What the step took.
        stall_seconds: The part of it in which compute waited for copies.
        launched: What took an accelerator and its host how long; None where that is not known.
        is_link_slower: Whether a link turned out slower; that matters if it shows in stalls.
        is_link_faster: Whether one turned out faster; that matters if the plan costs time.
    """
    plan = kind.plan
    if plan is None or kind.graph is None or kind.spec is None:
        return
    if kind.family is not None or kind.aligns:  # whose plan is for larger sizes, or another structure
        return
    waits = launched.waits(kind.graph, plan, stall_seconds) if launched is not None else Halves(0.0, 0.0)
    kind.pace.note_waits(plan, sum(waits))
    factor = kind.corrections.by_time(
        plan, kind.spec, step_seconds, stall_seconds, sum(waits), is_slower=is_link_slower, is_faster=is_link_faster
    )
    if factor is not None:
        kind.graph = scaled(kind.graph, factor) if factor != 1 else kind.graph
    elif not (
        _may_go_without_mode(kind) and kind.corrections.by_mode(plan, kind.spec, mode_share(kind.graph, waits.forward))
    ):
        return
    kind.superseded, kind.program = plan, None


def _may_go_without_mode(kind: PlanEntry) -> bool:
    """Whether another plan would spare its steps the dispatch mode."""
    is_ours = kind.plan is not None and kind.plan.policy == "auto" and kind.given_plan is None
    return is_ours and not (kind.takes_data or kind.changes.num_deviations)


def ran_out_of_memory(kind: PlanEntry) -> None:
    """Plan tighter: the device has less than the plan counted on."""
    if kind.plan is None:
        return
    kind.usable_bytes = max(kind.plan.floor_bytes, int(_TIGHTER * kind.plan.predicted_peak_bytes))
    kind.program = kind.measured_peak_bytes = None
    kind.begin_anew()


def note_retries(kind: PlanEntry, num_retries: int) -> None:
    """Plan tighter where the allocator gives its reserve back again and again, for which the device stands still.

    Once is no sign of that: the first step under a new plan finds the reserve cut for the one before.

    Args:
        kind: The kind of step.
        num_retries: How often it had to in the last step, and after it.
    """
    if not num_retries or kind.phase != "planned" or kind.plan is None:
        return
    usable_bytes = kind.corrections.by_retries(kind.plan, kind.num_planned)
    if usable_bytes is not None:
        kind.usable_bytes, kind.program = usable_bytes, None
        _log.info(
            "the device's allocator had to give back its reserve under the plan: steps are planned for %s",
            format_bytes(usable_bytes),
        )


def weigh_search(kind: PlanEntry) -> None:
    """Have a hasty plan made again, thoroughly, once its steps have lost so much that the search pays.

    A search takes off a tenth of what a plan costs, or less: so it is due when that much of what the steps took
    beyond plain ones is what a search takes.
    """
    if kind.family is None or kind.plan is None or kind.is_searched or kind.plan.policy != "auto":
        return
    kind.lost_seconds += max(0.0, kind.plan.predicted_step_seconds - kind.plan.plain_step_seconds)
    if _WORTH * kind.lost_seconds > kind.family.search_seconds:
        kind.is_searched = kind.must_search = True
        kind.program = None
