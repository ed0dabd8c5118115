"""Steps and plans to report on."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

from lightning_offload.graph import Action, Decision, DeviceSpec, MemoryPlan, StepGraph
from lightning_offload.planning.problem import Problem
from lightning_offload.planning.request import PlanRequest, build_plan
from lightning_offload.planning.simulator import simulate
from tests.graph.building import DEVICE, GraphBuilder

CARD = dataclasses.replace(DEVICE, name="a card", kind="cuda", overhead_seconds=0.01)
DISK = dataclasses.replace(CARD, host_memory_bytes=0, disk_write_bytes_per_second=50.0, disk_read_bytes_per_second=50.0)


def net(*modules: str, size: int = 100, seconds: float = 1.0) -> StepGraph:
    """A chain in which each module makes one result and saves it."""
    b = GraphBuilder()
    value, saves, previous = b.given(size), [], -1
    for module in modules:
        (value,) = b.op((value,), (size,), module=module, name=f"aten.{module[-1:] or 'x'}.default", seconds=seconds)
        saves.append(b.pack(value, module=module))
        if previous >= 0:
            b.drop(previous)
        previous = value
    b.drop(previous)
    b.backward()
    for save, module in zip(reversed(saves), reversed(modules), strict=True):
        b.unpack(save)
        (gradient,) = b.op((), (size,), module=module, name="aten.back.default", seconds=seconds)
        b.drop(gradient)
        b.release(save)
    return b.build()


SIX = net("stem", "body.0.conv", "body.0.norm", "body.1.conv", "body.1.norm", "head")
"""Results are storages 1 to 6; twelve seconds of ops."""
MIXED: dict[int, Action] = {1: "swap", 2: "recompute", 3: "swap", 5: "recompute"}


def plan_of(
    graph: StepGraph,
    actions: dict[int, Action],
    device: DeviceSpec = CARD,
    *,
    budget_bytes: int | None = None,
    policy: str = "auto",
) -> MemoryPlan:
    """A plan of these actions."""
    problem = Problem(graph)
    timeline = simulate(problem, actions, device, limit_bytes=budget_bytes)
    return dataclasses.replace(
        build_plan(PlanRequest(problem, device, None), policy, actions, timeline), budget_bytes=budget_bytes
    )


def moved(plan: MemoryPlan, storage: int, **changes: Any) -> MemoryPlan:
    """The plan with one decision changed."""
    decisions: list[Decision] = [
        dataclasses.replace(d, **changes) if d.storage == storage else d for d in plan.decisions
    ]
    return dataclasses.replace(plan, decisions=tuple(decisions))


def plots_of(page: Path) -> dict[str, Any]:
    """The plots in a page."""
    found = re.search(r'<script type="application/json" id="plots">(.*?)</script>', page.read_text(encoding="utf-8"))
    assert found is not None
    plots: dict[str, Any] = json.loads(found[1])
    return plots
