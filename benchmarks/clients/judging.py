"""What the runs of a training say: figures, and what must not be. Pure functions over what `runs.measure` returns."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

FIRST_STEADY = 20
"""From this step on CPU time counts; of a shorter run its second half does."""

Found = dict[str, Any]
"""What `runs.measure` returns."""

_SAME = ("losses", "weights", "random_state")


def faults(found: Found) -> list[str]:
    """What must not be: a run that ends by an error, other bits than plain's, a peak above the budget untold."""
    if "missing" in found:
        return []
    runs = found["runs"]
    told = [f"{label}: {run['message']}" for label, run in runs.items() if run["state"] == "error"]
    plain = runs["plain, counted"]
    if plain["state"] == "done" and not plain["seen"]["losses"]:
        told.append("plain, counted: no step was seen")
    for label, run in runs.items():
        if plain["state"] == run["state"] == "done":
            differing = [name.replace("_", " ") for name in _SAME if run["seen"][name] != plain["seen"][name]]
            if differing:
                told.append(f"{label}: {' and '.join(differing)} differ from those of the plain run that was counted")
        if run["state"] == "refused":
            told.append(f"{label}: {run['message']}")
    tight = runs.get("tight, counted")
    if tight is not None and tight["state"] == "done" and not tight["seen"]["warnings"]:
        peak_bytes = planned_peak(tight["seen"])
        if peak_bytes > found["budget_bytes"]:
            told.append(
                f"tight: {peak_bytes:,} bytes under a plan, above the budget of {found['budget_bytes']:,}, untold"
            )
    return told


def is_refused(found: Found) -> bool:
    """Whether no budget was feasible."""
    return "runs" in found and runs_done(found, "plain") and "budget_bytes" not in found


def runs_done(found: Found, kind: str) -> bool:
    """Whether all runs of a kind ended well."""
    states = [run["state"] for label, run in found["runs"].items() if label.startswith(kind)]
    return bool(states) and all(state == "done" for state in states)


def planned_peak(seen: dict[str, Any]) -> int:
    """Live bytes at most in the steps under a plan."""
    steps = zip(seen["peak_bytes"], seen["phases"], strict=False)
    return max((peak for peak, phase in steps if phase == "planned"), default=0)


def num_planned(seen: dict[str, Any]) -> int:
    """How many steps ran under a plan."""
    return int(seen["phases"].count("planned"))


def step_seconds(seen: dict[str, Any]) -> float:
    """CPU time of a steady step."""
    seconds = seen["cpu_seconds"]
    first = min(FIRST_STEADY - 1, len(seconds) // 2)
    return statistics.median(seconds[first:])


def figures(found: Found) -> dict[str, float]:
    """By metric, of a training whose runs ended well."""
    return dict(_figures(found))


def _figures(found: Found) -> Iterator[tuple[str, float]]:
    seen = {label: run["seen"] for label, run in found["runs"].items()}
    plain = seen["plain, counted"]
    yield "num_steps", len(plain["peak_bytes"])
    yield "plain_peak_bytes", max(plain["peak_bytes"])
    yield "plain_allocated_bytes", plain["allocated_bytes"]
    twice = [step_seconds(seen[label]) for label in ("plain, timed", "plain, timed again")]
    yield "plain_step_seconds", statistics.mean(twice)
    yield "plain_again_ratio", twice[1] / twice[0]
    if "budget_bytes" in found:
        yield "budget_bytes", found["budget_bytes"]
        yield "budget_share", found["share"]
    for kind in ("tight", "ample"):
        if f"{kind}, counted" in seen:
            counted = seen[f"{kind}, counted"]
            yield f"{kind}_first_peak_bytes", max(counted["peak_bytes"])
            yield f"{kind}_peak_bytes", planned_peak(counted)
            yield f"{kind}_allocated_bytes", counted["allocated_bytes"]
            yield f"num_{kind}_planned", num_planned(seen[f"{kind}, timed"])
            yield f"{kind}_ratio", step_seconds(seen[f"{kind}, timed"]) / statistics.mean(twice)
