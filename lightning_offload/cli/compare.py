"""``compare``: all policies side by side on one step, device and budget."""

from __future__ import annotations

import dataclasses
from typing import Any

from lightning_offload.cli.figures import bytes_by_action, overhead, saved_storages
from lightning_offload.cli.output import console, percent, progress, say, size, write_json
from lightning_offload.cli.plan import planned, state_of
from lightning_offload.cli.setting import Checked, PlanOptions, check_options
from lightning_offload.errors import BudgetInfeasibleError
from lightning_offload.graph.step_graph import StepGraph
from lightning_offload.planning.planner import POLICIES
from lightning_offload.units import format_bytes, format_seconds


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PolicyResult:
    """What a policy makes of a step.

    Attributes:
        policy: Its name.
        feasible: Whether it meets the budget; if not, all but ``floor_bytes`` is None.
        floor_bytes: The smallest budget that it meets, as far as it tells.
        predicted_peak_bytes: Peak of device memory.
        predicted_step_seconds: Step time.
        overhead: By what share that is more than plain.
        predicted_stall_seconds: The part in which compute waits for copies.
        swap_bytes: Saved bytes that it swaps.
        recompute_bytes: Saved bytes that it recomputes.
        traffic_bytes: Bytes over the link in a step, both ways.
    """

    policy: str
    feasible: bool
    floor_bytes: int | None
    predicted_peak_bytes: int | None = None
    predicted_step_seconds: float | None = None
    overhead: float | None = None
    predicted_stall_seconds: float | None = None
    swap_bytes: int | None = None
    recompute_bytes: int | None = None
    traffic_bytes: int | None = None


def compare(options: PlanOptions, *, as_json: bool) -> None:
    """Plan with every policy and print the results side by side.

    Args:
        options: What to plan; its policy is ignored.
        as_json: Whether to print JSON in place of a table.

    Raises:
        BudgetInfeasibleError: No policy meets the budget.
        OffloadError: An option is wrong.
    """
    checked = check_options(options)
    results, failures = [], []
    with progress(f"capturing a step of {options.target}") as tell:
        captured = checked.workload.capture(options.batch_size, checked.device)
        for policy in POLICIES:
            tell(f"planning with {policy}")
            try:
                results.append(_result(checked, captured.graph, policy))
            except BudgetInfeasibleError as error:
                failures.append(error)
                results.append(PolicyResult(policy=policy, feasible=False, floor_bytes=error.floor_bytes))
    feasible = [result for result in results if result.feasible]
    if not feasible:
        raise min(failures, key=lambda error: error.floor_bytes)
    if as_json:
        rows = [dataclasses.asdict(result) for result in results]
        payload: dict[str, Any] = checked.header | {"budget_bytes": checked.budget_bytes} | state_of(captured)
        write_json(payload | {"policies": rows})
    else:
        _print(checked, results)


def _result(checked: Checked, graph: StepGraph, policy: str) -> PolicyResult:
    plan = planned(checked, graph, policy)
    totals = bytes_by_action(saved_storages(graph, plan))
    return PolicyResult(
        policy=policy,
        feasible=True,
        floor_bytes=plan.floor_bytes if policy == "auto" else None,
        predicted_peak_bytes=plan.predicted_peak_bytes,
        predicted_step_seconds=plan.predicted_step_seconds,
        overhead=overhead(plan),
        predicted_stall_seconds=plan.predicted_stall_seconds,
        swap_bytes=totals["swap"],
        recompute_bytes=totals["recompute"],
        traffic_bytes=2 * totals["swap"],
    )


def _print(checked: Checked, results: list[PolicyResult]) -> None:
    from rich.table import Table

    options = checked.options
    title = (
        f"{options.target}, batch {options.batch_size}, {options.dtype} on {checked.device.name}, "
        f"budget {size(checked.budget_bytes)}"
    )
    say(title, style="bold")
    table = Table()
    table.add_column("policy", no_wrap=True)
    for name in ("peak", "step time", "overhead", "traffic", "recomputed"):
        table.add_column(name, justify="right", no_wrap=True)
    fastest = sorted(results, key=lambda r: (not r.feasible, r.predicted_step_seconds or 0.0, r.floor_bytes or 0))
    for result in fastest:
        table.add_row(result.policy, *_cells(result))
    console().print(table)
    if not all(result.feasible for result in results):
        say("infeasible: the peak is the smallest budget that the policy meets")


def _cells(result: PolicyResult) -> tuple[str, ...]:
    if result.predicted_peak_bytes is None or result.predicted_step_seconds is None or result.overhead is None:
        return (size(result.floor_bytes), "infeasible") + ("-",) * 3
    return (
        format_bytes(result.predicted_peak_bytes),
        format_seconds(result.predicted_step_seconds),
        percent(result.overhead),
        format_bytes(result.traffic_bytes or 0),
        format_bytes(result.recompute_bytes or 0),
    )
