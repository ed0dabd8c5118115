"""Figures of a plan on a step written by hand: exact sizes, times and totals."""

from __future__ import annotations

import pytest

from lightning_offload.cli.figures import bytes_by_action, module_totals, saved_storages
from lightning_offload.cli.output import duration, percent, progress, size
from lightning_offload.graph.memory_plan import Decision, MemoryPlan
from lightning_offload.graph.step_graph import StepGraph
from tests.graph.building import GraphBuilder


def step() -> StepGraph:
    """Two ops in forward whose results are saved, and backward ops of 2, 3 and 1 s that need them in reverse."""
    build = GraphBuilder()
    weight = build.given(100)
    a = build.op((weight,), (10,), name="aten.mm.default", module="first")[0]
    save_a = build.pack(a, module="first")
    save_weight = build.pack(weight, module="first")
    b = build.op((a,), (40,), name="aten.relu.default", seconds=4.0, module="second")[0]
    save_b = build.pack(b, module="second")
    build.backward()
    for save, seconds in ((save_b, 2.0), (save_a, 3.0), (save_weight, 1.0)):
        build.unpack(save)
        build.op((), (1,), seconds=seconds)
        build.release(save)
    return build.build()


def plan_of(graph: StepGraph, *decisions: Decision) -> MemoryPlan:
    return MemoryPlan(
        graph_digest=graph.digest(), policy="auto", budget_bytes=None, decisions=decisions, predicted_peak_bytes=1,
        predicted_step_seconds=1.0, plain_peak_bytes=1, plain_step_seconds=1.0, floor_bytes=1, floor_op="",
        bound_seconds=1.0,
    )  # fmt: skip


def test_saved_storages() -> None:
    """Persistent ones do not count; idle time is that of the ops in between; the costliest to keep comes first."""
    graph = step()
    swap = Decision(storage=1, action="swap", tier="disk")
    a, b = saved_storages(graph, plan_of(graph, swap))
    assert (a.module, a.op, a.num_bytes, a.idle_seconds, a.action, a.tier) == (
        "first", "aten.mm.default", 10, 6.0, "swap", "disk"
    )  # fmt: skip
    assert (b.module, b.op, b.num_bytes, b.idle_seconds, b.action, b.tier) == (
        "second", "aten.relu.default", 40, 0.0, "keep", None
    )  # fmt: skip
    assert a.weight == 60.0


def test_totals() -> None:
    """Bytes by action, in all and by module."""
    graph = step()
    saved = saved_storages(graph, plan_of(graph, Decision(storage=2, action="recompute")))
    assert bytes_by_action(saved) == {"keep": 10, "swap": 0, "recompute": 40}
    totals = [(t.module, t.keep_bytes, t.swap_bytes, t.recompute_bytes) for t in module_totals(saved)]
    assert totals == [("first", 10, 0, 0), ("second", 0, 0, 40)]


def test_texts() -> None:
    """Shares are signed; no limit and no time have words."""
    assert (percent(0.034), percent(-0.5)) == ("+3.4%", "-50.0%")
    assert (size(None), size(1024), duration(0), duration(1.5)) == ("no limit", "1.0 KiB", "none", "1.50 s")


def test_progress_is_for_terminals(capsys: pytest.CaptureFixture[str]) -> None:
    """Where standard error is no terminal, nothing is written to it."""
    with progress("working") as tell:
        tell("more")
    assert capsys.readouterr() == ("", "")
