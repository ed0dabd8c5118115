"""Provides a kind of step with a plan and room for it, and learns from the steps that ran."""

from __future__ import annotations

from lightning_offload.plugins.gradient_traffic import shared_spec
from lightning_offload.plugins.hardware import Hardware
from lightning_offload.plugins.lifecycle import StepKind
from lightning_offload.plugins.persistent import PersistentState
from lightning_offload.plugins.run import StepRun
from lightning_offload.plugins.settings import Settings

_MAX_REPLANS = 4  # each tier can be refused once


def provide_plan(key: str, kind: StepKind, hardware: Hardware, state: PersistentState, settings: Settings) -> None:
    """Have a plan for a recorded kind of step, for the state and the hardware that there are now, and room for it.

    Args:
        key: What the kind of step is known by.
        kind: The kind of step.
        hardware: Where it runs.
        state: What is on the device beside it.
        settings: How to plan.

    Raises:
        BudgetInfeasibleError: No plan can meet the budget.
        SpillError: The disk has no room, and only disk may be used.
    """
    if kind.graph is None:
        return
    if kind.touched and kind.state_version != state.version:
        kind.state_version = state.version
        if not kind.was_restored and state.buckets.are_gone_from(kind.touched):
            kind.record_again()
    if kind.phase == "recording":
        return
    hardware.refresh()
    for _ in range(_MAX_REPLANS):
        if kind.program is None or kind.hardware_version != hardware.version:
            kind.hardware_version = hardware.version
            spec = shared_spec(hardware.planning_spec(kind.saved_bytes), kind.graph, hardware.device)
            given = hardware.adapted(settings.plan) if settings.plan is not None else None
            kind.replan(spec, hardware.budget_bytes, settings.policy, settings.keep, given)
        assert kind.program is not None
        if hardware.prepare(key, kind.program.layout):
            break


def learn_from(run: StepRun, hardware: Hardware) -> None:
    """Correct what is known of links and compute by a planned step that was measured."""
    if run.lane_times is None or run.kind.phase != "planned":
        return
    hardware.observe(run.lane_times)
    if run.seconds is not None:
        spec = run.kind.spec
        run.kind.compare(
            run.seconds,
            run.stall_seconds,
            is_link_slower=hardware.is_slower_than(spec),
            is_link_faster=hardware.is_faster_than(spec),
        )
