"""The trace: valid events, lanes without overlaps, counters, arrows."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_offload.errors import PlanError, ReportFileError
from lightning_offload.graph import Action, DeviceSpec, MemoryPlan, StepGraph
from lightning_offload.planning.problem import Problem
from lightning_offload.report import save_plan_trace
from lightning_offload.report.plan_view import view_plan
from tests.graph.building import step_graphs, tiered_devices
from tests.report.steps import CARD, DISK, MIXED, SIX, net, plan_of

KEYS = {
    "M": {"name", "args"},
    "X": {"name", "cat", "dur", "args"},
    "C": {"name", "args"},
    "s": {"name", "cat", "id"},
    "f": {"name", "cat", "id", "bp"},
}
"""What each kind of event has beside ph, pid, tid and ts."""

Events = list[dict[str, Any]]


def trace(folder: Path, graph: StepGraph, plan: MemoryPlan, device: DeviceSpec) -> Events:
    """The events of a trace, checked against the format."""
    save_plan_trace(folder / "trace.json", graph, plan, device)
    payload = json.loads((folder / "trace.json").read_text(encoding="utf-8"))
    assert set(payload) == {"displayTimeUnit", "otherData", "traceEvents"}
    events: Events = payload["traceEvents"]
    for event in events:
        assert set(event) - {"cname"} == KEYS[event["ph"]] | {"ph", "pid", "tid", "ts"}
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert event["ts"] >= 0
    stamps = [event["ts"] for event in events if event["ph"] != "M"]
    assert stamps == sorted(stamps)
    check_lanes(events)
    check_arrows(events)
    return events


def check_lanes(events: Events) -> None:
    """What is on one lane does not overlap, and each lane has a name."""
    complete = sorted((e for e in events if e["ph"] == "X"), key=lambda e: (e["tid"], e["ts"], e["dur"]))
    for one, two in itertools.pairwise(complete):
        if one["tid"] == two["tid"]:
            assert one["ts"] + one["dur"] <= two["ts"] + 0.0015, (one, two)
    named = {e["tid"] for e in events if e["name"] == "thread_name"}
    assert named == {e["tid"] for e in complete}


def check_arrows(events: Events) -> None:
    """Each begins on a copy out and ends on a later copy back of the same storage."""
    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    assert starts.keys() == ends.keys()
    copies = {(e["tid"], e["ts"], e["args"]["storage"]) for e in events if e["ph"] == "X" and e["cat"] == "copy"}
    for storage, start in starts.items():
        assert start["ts"] <= ends[storage]["ts"]
        assert start["tid"] != ends[storage]["tid"]
        assert {(e["tid"], e["ts"], storage) for e in (start, ends[storage])} <= copies


def names(events: Events, kind: str) -> list[str]:
    return [event["args"]["name"] for event in events if event["name"] == kind]


def test_lanes_are_named_threads(tmp_path: Path) -> None:
    """Those that are in use, in a fixed order, in a process named by policy and device."""
    events = trace(tmp_path, SIX, plan_of(SIX, MIXED), CARD)
    assert names(events, "process_name") == ["auto on a card"]
    assert names(events, "thread_name") == ["compute", "D2H", "H2D"]
    events = trace(tmp_path, SIX, plan_of(SIX, MIXED, DISK), DISK)
    assert names(events, "thread_name") == ["compute", "D2H", "H2D", "disk write", "disk read"]


def test_events_are_the_spans(tmp_path: Path) -> None:
    """Microseconds of the simulated clock, with module, storage and bytes."""
    plan = plan_of(SIX, MIXED)
    events = [event for event in trace(tmp_path, SIX, plan, CARD) if event["ph"] == "X"]
    spans = view_plan(SIX, plan, CARD).planned.spans
    assert len(events) == len(spans)
    assert max(e["ts"] + e["dur"] for e in events) == pytest.approx(plan.predicted_step_seconds * 1e6)
    (out, *_) = [event for event in events if event["name"] == "swap-out stem"]
    assert (out["ts"], out["dur"]) == (1e6, 1e6)
    assert out["args"] == {
        "module": "stem", "phase": "forward", "op": "aten.m.default", "storage": 1, "num_bytes": 100, "tier": "host"
    }  # fmt: skip
    assert len([event for event in events if event["name"] == "replay body.0.conv"]) == 1


def test_counters_are_memory_and_budget(tmp_path: Path) -> None:
    """Their highest values are the peaks; without a budget there is no counter of it."""
    plan = plan_of(SIX, MIXED, budget_bytes=600)
    counters: dict[str, list[int]] = {}
    for event in trace(tmp_path, SIX, plan, CARD):
        if event["ph"] == "C":
            counters.setdefault(event["name"], []).append(event["args"]["bytes"])
    assert {name: max(values) for name, values in counters.items()} == {
        "memory, planned": plan.predicted_peak_bytes,
        "memory, everything kept": plan.plain_peak_bytes,
        "budget": 600,
    }
    plain = trace(tmp_path, SIX, plan_of(SIX, {}), CARD)
    assert "budget" not in {event["name"] for event in plain if event["ph"] == "C"}


def test_each_swap_that_comes_back_has_an_arrow(tmp_path: Path) -> None:
    """On the lanes of its tier."""
    arrows = [e for e in trace(tmp_path, SIX, plan_of(SIX, MIXED), CARD) if e["ph"] in "sf"]
    assert sorted((e["ph"], e["id"], e["tid"]) for e in arrows) == [("f", 1, 3), ("f", 3, 3), ("s", 1, 2), ("s", 3, 2)]
    arrows = [e for e in trace(tmp_path, SIX, plan_of(SIX, MIXED, DISK), DISK) if e["ph"] in "sf"]
    assert sorted((e["ph"], e["id"], e["tid"]) for e in arrows) == [("f", 1, 5), ("f", 3, 5), ("s", 1, 4), ("s", 3, 4)]


@given(graph=step_graphs(), data=st.data(), device=tiered_devices())
def test_random_plans_give_valid_traces(
    graph: StepGraph, data: st.DataObject, device: DeviceSpec, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Whatever is swapped, to whatever tier, and whether it ever comes back."""
    options = {s: ["keep", "swap"] + ["recompute"] * c.can_recompute for s, c in Problem(graph).candidates.items()}
    drawn = {s: data.draw(st.sampled_from(choices)) for s, choices in options.items()}
    actions: dict[int, Action] = {s: action for s, action in drawn.items() if action != "keep"}  # type: ignore[misc]
    trace(tmp_path_factory.getbasetemp(), graph, plan_of(graph, actions, device), device)


def test_bad_path_and_bad_plan_leave_no_file(tmp_path: Path) -> None:
    """Errors come before anything is written."""
    with pytest.raises(ReportFileError, match=r"must end in \.json"):
        save_plan_trace(tmp_path / "trace.html", SIX, plan_of(SIX, {}), CARD)
    with pytest.raises(PlanError, match="another model"):
        save_plan_trace(tmp_path / "trace.json", net("a"), plan_of(SIX, {}), CARD)
    assert list(tmp_path.iterdir()) == []
