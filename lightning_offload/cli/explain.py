"""``explain``: what a plan does, from its file alone, and with names and sizes where its step is at hand.

The step is that of ``--graph``, of the file that ``plan`` writes beside the plan, or of a model that is captured again.
With a step it is also said what sets the smallest feasible budget, and what would lower it; how long a step takes then
is predicted for a device that is named.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from lightning_offload.cli.options import PlanOptions
from lightning_offload.cli.output import console, note, progress, say, write_json
from lightning_offload.cli.plan import NUM_SHOWN
from lightning_offload.cli.setting import Checked, check_options, find_device
from lightning_offload.errors import PlanError
from lightning_offload.graph.catalog import check_dtype
from lightning_offload.graph.device_spec import DeviceSpec
from lightning_offload.graph.files import read_file, sibling_graph
from lightning_offload.graph.memory_plan import AT_PACK, ON_DEMAND, MemoryPlan
from lightning_offload.graph.step_graph import StepGraph
from lightning_offload.planning.findings import FloorFinding, explain_floor
from lightning_offload.report.plan_view import (
    action_bytes,
    costliest,
    module_totals,
    predictions,
    stored_in,
    verdict,
)
from lightning_offload.report.tables import (
    action_rows,
    floor_rows,
    live_table,
    modules_table,
    prediction_rows,
    remedies_table,
    storages_table,
    two_columns,
)

_T = TypeVar("_T")


def explain(
    path: Path,
    graph_path: Path | None,
    options: PlanOptions,
    *,
    has_model: bool,
    is_whole: bool = False,
    as_json: bool,
) -> None:
    """Print what a plan does.

    Args:
        path: The plan.
        graph_path: Its step; None to look beside the plan.
        options: The model to capture its step of; without one the device that the plan is for, None to predict no
            times, and what is computed in, which that device's rates depend on.
        has_model: Whether there is one.
        is_whole: Whether to list each module and storage, not groups and the costliest.
        as_json: Whether to print JSON in place of tables; it has them all.

    Raises:
        PlanError: A file cannot be read, or is no plan or step, or the step is another one.
        OffloadError: An option is wrong.
    """
    plan = _parsed(MemoryPlan.from_json, path, "plan")
    checked = check_options(options) if has_model else None
    dtype = check_dtype(options.dtype)
    named = find_device(options.device, dtype) if options.device is not None and checked is None else None
    graph = _graph_of(plan, path, graph_path, checked)
    finding: FloorFinding | None = None
    if graph is not None:
        plan.check(graph)
        if checked is not None:
            device: DeviceSpec | None = checked.device
        else:
            device = named
        finding = _finding(plan, graph, device, checked)
    if as_json:
        write_json(_payload(plan, graph, finding))
    else:
        _print(path, plan, graph, finding, is_whole=is_whole)


def _finding(
    plan: MemoryPlan, graph: StepGraph, device: DeviceSpec | None, checked: Checked | None
) -> FloorFinding | None:
    """What sets the floor; with a model, half its batch is tried too."""
    if not graph.ops:
        return None
    smaller: StepGraph | None = None
    with progress("looking for what sets the smallest feasible budget") as tell:
        if checked is not None and checked.options.batch_size > 1:
            tell(f"capturing a step of {checked.options.target} at half the batch")
            smaller = checked.workload.capture(checked.options.batch_size // 2, checked.device).graph
        return explain_floor(graph, device, budget_bytes=plan.budget_bytes, smaller_batch=smaller, tell=tell)


def _graph_of(plan: MemoryPlan, path: Path, graph_path: Path | None, checked: Checked | None) -> StepGraph | None:
    if graph_path is not None:
        return _parsed(StepGraph.from_json, graph_path, "graph")
    if checked is not None:
        with progress(f"capturing a step of {checked.options.target}"):
            return checked.workload.capture(checked.options.batch_size, checked.device).graph
    if not sibling_graph(path).is_file():
        return None
    graph = _parsed(StepGraph.from_json, sibling_graph(path), "graph")
    if graph.digest() != plan.graph_digest:
        note(f"{sibling_graph(path)} is the step of another plan and is ignored")
        return None
    return graph


def _parsed(parse: Callable[[str], _T], path: Path, what: str) -> _T:
    try:
        return parse(read_file(path))
    except PlanError as error:
        raise PlanError(f"{what} {str(path)!r}: {error}") from None
    except (OSError, ValueError) as error:
        raise PlanError(
            f"{what} {str(path)!r} cannot be read: {error}; name a file that `plan --output` wrote"
        ) from None


def _counts(plan: MemoryPlan) -> dict[str, int]:
    """What a plan's decisions say of themselves."""
    swaps = [decision for decision in plan.decisions if decision.action == "swap"]
    replays = [decision for decision in plan.decisions if decision.action == "recompute"]
    return {
        "num_decisions": len(plan.decisions),
        "num_swapped": len(swaps),
        "num_to_disk": sum(decision.tier == "disk" for decision in swaps),
        "num_held_after_pack": sum(decision.release_op != AT_PACK for decision in swaps),
        "num_prefetched": sum(decision.prefetch_unpack != ON_DEMAND for decision in swaps),
        "num_recomputed": len(replays),
        "num_not_memoised": sum(not decision.memo for decision in replays),
    }


def _payload(plan: MemoryPlan, graph: StepGraph | None, finding: FloorFinding | None) -> dict[str, Any]:
    payload = predictions(plan) | _counts(plan)
    payload["floor"] = dataclasses.asdict(finding) if finding is not None else None
    if graph is None:
        return payload | {"storages": None, "modules": None}
    saved = stored_in(graph, plan)
    storages = [each.state_dict() for each in costliest(saved)]
    return payload | action_bytes(saved) | {"storages": storages, "modules": module_totals(saved)}


def _print(
    path: Path, plan: MemoryPlan, graph: StepGraph | None, finding: FloorFinding | None, *, is_whole: bool
) -> None:
    counts = _counts(plan)
    say(f"{path}, made by policy {plan.policy!r}: {verdict(plan)}", style="bold")
    rows = prediction_rows(plan)
    swapped = (
        f"{counts['num_swapped']:,} storages, {counts['num_to_disk']:,} of them to disk; "
        f"{counts['num_held_after_pack']:,} leave while compute goes on, {counts['num_prefetched']:,} are prefetched"
    )
    recomputed = (
        f"{counts['num_recomputed']:,} storages, {counts['num_not_memoised']:,} of them each time they are read"
    )
    rows += [("graph", plan.graph_digest), ("swapped", swapped), ("recomputed", recomputed)]
    if graph is None:
        console().print(two_columns(rows))
        say("\nNames and sizes are in the step's graph: give --graph, or --model with its inputs.")
        return
    saved = stored_in(graph, plan)
    rows += [(f"bytes {name}", text) for name, text in action_rows(plan, saved)]
    console().print(two_columns(rows))
    if saved:
        console().print(storages_table(saved, len(saved) if is_whole else NUM_SHOWN))
    console().print(modules_table(saved, is_whole=is_whole))
    if finding is not None:
        say("\nWhat sets the smallest feasible budget", style="bold")
        console().print(two_columns(floor_rows(finding, plan)))
        if finding.live:
            console().print(live_table(finding, len(finding.live) if is_whole else NUM_SHOWN))
        console().print(remedies_table(finding, plan))
    num_modules = len({each.module for each in saved})
    if not is_whole and len(saved) > NUM_SHOWN:
        say(f"\n--all lists all {len(saved):,} storages and each of {num_modules:,} modules.")
