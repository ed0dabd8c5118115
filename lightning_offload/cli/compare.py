"""``compare``: all policies side by side on one step, device and budget."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_offload.cli.options import PlanOptions
from lightning_offload.cli.output import console, progress, say, write_json
from lightning_offload.cli.plan import planned, state_of
from lightning_offload.cli.setting import Checked, check_options, kept_storages
from lightning_offload.report.plan_view import PolicyOutcome, compare_policies
from lightning_offload.report.tables import comparison_table


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
    with progress(f"capturing a step of {options.target}") as tell:
        captured = checked.workload.capture(options.batch_size, checked.device)
        keep = kept_storages(captured.graph, options.keep)
        outcomes = compare_policies(
            captured.graph, checked.device, checked.budget_bytes, keep=keep,
            tell=lambda policy: tell(f"planning with {policy}"),
        )  # fmt: skip
        if all(outcome.step_seconds is None for outcome in outcomes):
            planned(checked, captured.graph, min(outcomes, key=lambda outcome: outcome.floor_bytes or 0).policy)
    if as_json:
        payload: dict[str, Any] = checked.header | {"budget_bytes": checked.budget_bytes} | state_of(captured)
        write_json(payload | {"policies": [_state(outcome) for outcome in outcomes]})
    else:
        _print(checked, outcomes)


def _state(outcome: PolicyOutcome) -> dict[str, Any]:
    is_feasible = outcome.step_seconds is not None
    return {
        "policy": outcome.policy,
        "feasible": is_feasible,
        "floor_bytes": outcome.floor_bytes,
        "predicted_peak_bytes": outcome.peak_bytes,
        "predicted_step_seconds": outcome.step_seconds,
        "overhead": (outcome.overhead or 0.0) if is_feasible else None,
        "predicted_stall_seconds": outcome.stall_seconds,
        "swap_bytes": outcome.swap_bytes,
        "recompute_bytes": outcome.recompute_bytes,
        "traffic_bytes": outcome.traffic_bytes,
    }


def _print(checked: Checked, outcomes: Sequence[PolicyOutcome]) -> None:
    options = checked.options
    title = (
        f"{options.target}, batch {options.batch_size}, {options.dtype} on {checked.device.name}, "
        f"budget {checked.budget_text}"
    )
    say(title, style="bold")
    fastest = sorted(outcomes, key=lambda o: (o.step_seconds is None, o.step_seconds or 0.0, o.floor_bytes or 0))
    console().print(comparison_table(fastest))
