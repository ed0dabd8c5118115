"""Figures of a plan for people and programs: totals, rates, and the storages that matter most."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any

from lightning_offload.graph.memory_plan import Action, Decision, MemoryPlan
from lightning_offload.graph.step_graph import Save, StepGraph

ACTIONS: tuple[Action, ...] = ("keep", "swap", "recompute")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SavedStorage:
    """One storage that autograd saved, and what a plan does with it.

    Attributes:
        storage: Index in the graph.
        module: Who saved it first.
        op: Who made it, "" for what no op made.
        num_bytes: Size.
        idle_seconds: Time of plain compute between its first save and the first time it is needed again.
        action: Keep, swap or recompute.
        tier: Where it is swapped to; None unless it is.
    """

    storage: int
    module: str
    op: str
    num_bytes: int
    idle_seconds: float
    action: Action
    tier: str | None

    @property
    def weight(self) -> float:
        """Byte-seconds of device memory that keeping it costs."""
        return self.num_bytes * self.idle_seconds


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModuleTotal:
    """What a plan does with all that one module saved, in bytes."""

    module: str
    keep_bytes: int
    swap_bytes: int
    recompute_bytes: int


def saved_storages(graph: StepGraph, plan: MemoryPlan) -> list[SavedStorage]:
    """All saved storages that did not exist before the step, the costliest to keep first."""
    decisions = {decision.storage: decision for decision in plan.decisions}
    clock = _Clock(graph)
    saves: dict[int, list[Save]] = {}
    for save in graph.saves:
        saves.setdefault(graph.values[save.value].storage, []).append(save)
    found = [
        _describe(graph, storage, group, decisions.get(storage), clock)
        for storage, group in saves.items()
        if not graph.storages[storage].is_persistent
    ]
    return sorted(found, key=lambda saved: (-saved.weight, -saved.num_bytes, saved.storage))


def module_totals(saved: list[SavedStorage]) -> list[ModuleTotal]:
    """Totals by module, in the order in which modules first saved."""
    sums: dict[str, dict[Action, int]] = {}
    for entry in sorted(saved, key=lambda entry: entry.storage):
        totals = sums.setdefault(entry.module, dict.fromkeys(ACTIONS, 0))
        totals[entry.action] += entry.num_bytes
    return [
        ModuleTotal(
            module=module, keep_bytes=t["keep"], swap_bytes=t["swap"], recompute_bytes=t["recompute"]
        )
        for module, t in sums.items()
    ]  # fmt: skip


def bytes_by_action(saved: list[SavedStorage]) -> dict[Action, int]:
    """Bytes kept, swapped and recomputed."""
    return {action: sum(entry.num_bytes for entry in saved if entry.action == action) for action in ACTIONS}


def overhead(plan: MemoryPlan) -> float:
    """By what share a planned step takes longer than a plain one."""
    return plan.predicted_step_seconds / plan.plain_step_seconds - 1 if plan.plain_step_seconds else 0.0


def gap(plan: MemoryPlan) -> float:
    """By what share a planned step takes longer than the bound that no plan can beat."""
    return plan.predicted_step_seconds / plan.bound_seconds - 1 if plan.bound_seconds else 0.0


def predictions(plan: MemoryPlan) -> dict[str, Any]:
    """All that a plan says of itself, its decisions aside, with stable keys."""
    return {
        "policy": plan.policy,
        "graph_digest": plan.graph_digest,
        "budget_bytes": plan.budget_bytes,
        "fits_plainly": plan.budget_bytes is None or plan.plain_peak_bytes <= plan.budget_bytes,
        "plain_peak_bytes": plan.plain_peak_bytes,
        "predicted_peak_bytes": plan.predicted_peak_bytes,
        "floor_bytes": plan.floor_bytes,
        "floor_op": plan.floor_op,
        "plain_step_seconds": plan.plain_step_seconds,
        "predicted_step_seconds": plan.predicted_step_seconds,
        "predicted_stall_seconds": plan.predicted_stall_seconds,
        "bound_seconds": plan.bound_seconds,
        "overhead": overhead(plan),
        "gap_to_bound": gap(plan),
        "predicted_host_bytes": plan.predicted_host_bytes,
        "predicted_disk_bytes": plan.predicted_disk_bytes,
    }


def as_rows(saved: list[SavedStorage]) -> list[Mapping[str, Any]]:
    """Saved storages for JSON."""
    return [dataclasses.asdict(entry) for entry in saved]


class _Clock:
    """Plain compute time at a tick."""

    def __init__(self, graph: StepGraph) -> None:
        self._ticks = [op.tick for op in graph.ops]
        self._until = [0.0, *itertools.accumulate(op.seconds for op in graph.ops)]

    def at(self, tick: int) -> float:
        return self._until[bisect.bisect_left(self._ticks, tick)]


def _describe(
    graph: StepGraph, storage: int, group: list[Save], decision: Decision | None, clock: _Clock
) -> SavedStorage:
    first = min(group, key=lambda save: save.pack_tick)
    unpacks = [tick for save in group for tick in save.unpack_ticks]
    needed = min(unpacks, default=max(save.release_tick for save in group))
    producer = graph.values[first.value].producer
    return SavedStorage(
        storage=storage,
        module=first.module,
        op=graph.ops[producer].name if producer >= 0 else "",
        num_bytes=graph.storages[storage].num_bytes,
        idle_seconds=clock.at(needed) - clock.at(first.pack_tick),
        action=decision.action if decision is not None else "keep",
        tier=decision.tier if decision is not None and decision.action == "swap" else None,
    )
