"""The trace of a plan, for Perfetto (ui.perfetto.dev) and chrome://tracing.

The format is that of Chrome's trace events: JSON with complete events ("X") on threads, one for each lane, counters
("C"), flow arrows from each swap-out to its swap-in ("s" and "f"), and metadata with names ("M"). Times are
microseconds of the simulated clock.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from lightning_offload._version import __version__
from lightning_offload.graph.device_spec import DeviceSpec
from lightning_offload.graph.memory_plan import MemoryPlan
from lightning_offload.graph.step_graph import StepGraph
from lightning_offload.planning.trace import Lane, Span, StepTrace
from lightning_offload.report.files import check_path, write_text
from lightning_offload.report.plan_view import PlanView, view_plan

__all__ = ["save_plan_trace"]

Event = dict[str, Any]

_PID = 1
_THREADS: dict[Lane, tuple[int, str]] = {
    "compute": (1, "compute"),
    "d2h": (2, "D2H"),
    "h2d": (3, "H2D"),
    "disk_write": (4, "disk write"),
    "disk_read": (5, "disk read"),
}
_COLORS = {"replay": "thread_state_running", "stall": "terrible", "slowdown": "grey"}  # of names both viewers know


def save_plan_trace(path: str | os.PathLike[str], graph: StepGraph, plan: MemoryPlan, device: DeviceSpec) -> None:
    """Write a trace of a plan, to be opened in Perfetto or chrome://tracing.

    Args:
        path: The file, ``.json``.
        graph: The step.
        plan: The plan for it.
        device: Where it runs.

    Raises:
        ReportFileError: There is no writing to the path; nothing is left there.
        PlanError: The plan is one for another step.
    """
    target = check_path(path, (".json",))
    view = view_plan(graph, plan, device)
    events = [*_names(view), *sorted(_events(view), key=lambda event: event["ts"])]
    payload = {
        "displayTimeUnit": "ms",
        "otherData": {
            "generator": f"lightning-offload {__version__}",
            "device": device.name,
            "policy": plan.policy,
            "graph_digest": plan.graph_digest,
        },
        "traceEvents": events,
    }
    write_text(target, json.dumps(payload, separators=(",", ":"), allow_nan=False) + "\n")


def _names(view: PlanView) -> Iterator[Event]:
    process = f"{view.plan.policy} on {view.device.name}"
    yield {"ph": "M", "name": "process_name", "pid": _PID, "tid": 0, "ts": 0, "args": {"name": process}}
    used = {span.lane for span in view.planned.spans}
    for lane, (tid, name) in _THREADS.items():
        if lane in used:
            yield {"ph": "M", "name": "thread_name", "pid": _PID, "tid": tid, "ts": 0, "args": {"name": name}}
            yield {"ph": "M", "name": "thread_sort_index", "pid": _PID, "tid": tid, "ts": 0,
                   "args": {"sort_index": tid}}  # fmt: skip


def _events(view: PlanView) -> Iterator[Event]:
    back = {span.storage for span in view.planned.spans if span.kind == "copy" and span.lane in ("h2d", "disk_read")}
    for span in view.planned.spans:
        yield _complete(span)
        if span.storage in back:
            yield from _arrow(span)
    yield from _counter("memory, planned", view.planned)
    yield from _counter("memory, everything kept", view.plain)
    if view.plan.budget_bytes is not None:
        for at in (0.0, max(view.planned.step_seconds, view.plain.step_seconds)):
            yield _count("budget", at, view.plan.budget_bytes)


def _complete(span: Span) -> Event:
    arguments: dict[str, Any] = {"module": span.module, "phase": span.phase, "op": span.name}
    if span.storage >= 0:
        arguments |= {"storage": span.storage, "num_bytes": span.num_bytes, "tier": span.tier}
    event = {
        "ph": "X",
        "pid": _PID,
        "tid": _THREADS[span.lane][0],
        "name": _title(span),
        "cat": span.kind,
        "ts": _micro(span.start_seconds),
        "dur": _duration(span),
        "args": arguments,
    }
    return {**event, "cname": _COLORS[span.kind]} if span.kind in _COLORS else event


def _title(span: Span) -> str:
    where = span.module or f"storage {span.storage}"
    if span.kind == "copy":
        return f"swap-{'out' if span.lane in ('d2h', 'disk_write') else 'in'} {where}"
    if span.kind in ("replay", "stall"):
        return f"{span.kind} {where}"
    return span.name


def _arrow(span: Span) -> Iterator[Event]:
    """One end of the arrow of a storage: on the lane of its tier, where a copy to disk is on two."""
    if span.kind != "copy" or (span.tier == "disk") != span.lane.startswith("disk"):
        return
    leaves = span.lane in ("d2h", "disk_write")
    event = {
        "ph": "s" if leaves else "f",
        "id": span.storage,
        "pid": _PID,
        "tid": _THREADS[span.lane][0],
        "name": "swap",
        "cat": "swap",
        "ts": _micro(span.start_seconds),
    }
    yield event if leaves else {**event, "bp": "e"}


def _counter(name: str, step: StepTrace) -> Iterator[Event]:
    changes = np.flatnonzero(np.concatenate(([True], step.memory[1:] != step.memory[:-1])))
    for i in changes.tolist():
        yield _count(name, float(step.tick_seconds[i]), int(step.memory[i]))
    yield _count(name, step.step_seconds, int(step.memory[-1]))


def _count(name: str, seconds: float, num_bytes: int) -> Event:
    return {"ph": "C", "pid": _PID, "tid": 0, "name": name, "ts": _micro(seconds), "args": {"bytes": num_bytes}}


def _duration(span: Span) -> float:
    # The difference of rounded ends, so that rounding makes no neighbours overlap.
    return round(_micro(span.end_seconds) - _micro(span.start_seconds), 3)


def _micro(seconds: float) -> float:
    return round(seconds * 1e6, 3)
