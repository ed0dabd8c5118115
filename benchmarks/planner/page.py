"""docs/planning.md: how plans are made, and how good they are, from a stored result."""

from __future__ import annotations

from collections import Counter
from typing import Any

from benchmarks.planner.cells import BEATEN, DEVICES, HEIGHTS, MODEL_NAMES, Cell
from benchmarks.tables import failures, markdown, versions

DOCUMENT = "planning.md"
_INFEASIBLE = "-"
_NUM_CLOSEST = 12
_NOTEWORTHY = 0.005  # of the plain step: where auto adds less everybody is close


def page(result: dict[str, Any]) -> str:
    """Return the document that is made from a stored result."""
    found = [Cell(**cell) for cell in result["config"]["cells"]]
    environment = result["environment"]
    lines = [
        _INTRODUCTION,
        _headline(found, result["config"]),
        "",
        _summary(result),
        "",
        f"Versions: {versions(environment)}. Commit: {environment['commit']}.",
        "",
    ]
    lines += ["## Where others come closest", "", _closest(found), ""]
    for device, dtype in DEVICES:
        chosen = [cell for cell in found if (cell.device, cell.dtype) == (device, dtype)]
        if chosen:
            lines += [f"## {device}, {dtype}", "", _table(chosen), ""]
    lines += ["## Policies", "", _wins(found), "", *failures(result, "## Not planned")]
    return "\n".join(lines).rstrip() + "\n"


def _headline(found: list[Cell], config: dict[str, Any]) -> str:
    worst = max(found, key=lambda cell: cell.over_bound)
    lost = [cell for cell in found if (cell.over_best_policy or 0.0) > BEATEN]
    num_left = config.get("num_left", 0)
    return (
        f"{num_left} of {len(MODEL_NAMES) * len(DEVICES)} models on devices are not planned yet. " * bool(num_left)
    ) + (
        f"**{len(found)} cells: at most {100 * (worst.over_bound - 1):.1f}% above what no plan of this runtime can go "
        f"below** ({worst.name}); {len(lost)} lost to a published policy by more than {100 * (BEATEN - 1):.1f}%."
    )


def _closest(found: list[Cell]) -> str:
    """The cells in which a published policy is nearest to auto, among those where auto adds anything."""
    least = 1 + _NOTEWORTHY
    rivalled = [c for c in found if c.best_policy is not None and c.policy_seconds["auto"] > least * c.plain_seconds]
    rivalled.sort(key=lambda c: (-(c.over_best_policy or 0.0), c.name))
    lines = []
    for cell in rivalled[:_NUM_CLOSEST]:
        best = cell.best_policy
        assert best is not None
        seconds = cell.policy_seconds
        lines.append((
            cell.name, _percent(seconds["auto"], cell), _percent(cell.bound_seconds, cell),
            f"{_percent(seconds[best], cell)} {best}", f"{cell.over_best_policy:.4f}",
        ))  # fmt: skip
    return markdown(("cell", "auto", "bound", "best published", "auto over best"), lines)


def _summary(result: dict[str, Any]) -> str:
    lines = []
    for row in result["rows"]:
        if row["case"].startswith("all cells"):
            value = f"{row['value']:.0f}" if row["metric"].startswith("num_") else f"{row['value']:.3f}"
            goal = "" if row["goal"] is None else f"<= {row['goal']:g}"
            lines.append((row["case"], row["metric"].replace("_", " "), value, goal))
    return markdown(("cells", "figure", "value", "goal"), lines)


def _table(found: list[Cell]) -> str:
    heights = [height for height in HEIGHTS if any(cell.height == height for cell in found)]
    lines = []
    for model in dict.fromkeys(cell.model for cell in found):
        by_height = {cell.height: cell for cell in found if cell.model == model}
        lines.append((model, *(_entry(by_height.get(height)) for height in heights)))
    return markdown(("model", *(f"h = {height:g}" for height in heights)), lines)


def _entry(cell: Cell | None) -> str:
    if cell is None:
        return _INFEASIBLE
    ours, bound = cell.policy_seconds["auto"], cell.bound_seconds
    best = cell.best_policy
    rival = f"{_percent(cell.policy_seconds[best], cell)} {best}" if best is not None else "none"
    return f"**{_percent(ours, cell)}** / {_percent(bound, cell)} / {rival}"


def _percent(seconds: float, cell: Cell) -> str:
    return f"{100 * (seconds / cell.plain_seconds - 1):.1f}"


def _wins(found: list[Cell]) -> str:
    names = [name for name in dict.fromkeys(name for cell in found for name in cell.policy_seconds) if name != "auto"]
    best = Counter(cell.best_policy for cell in found)
    lines = []
    for name in names:
        ratios = sorted(c.policy_seconds[name] / c.policy_seconds["auto"] for c in found if name in c.policy_seconds)
        middle = f"{ratios[len(ratios) // 2]:.3f}"
        lines.append((name, f"{len(ratios)} of {len(found)}", str(best[name]), middle))
    header = ("policy", "cells it fits", "cells where it is the best other", "median step time over auto's")
    return markdown(header, lines)


_INTRODUCTION = """# Planning

Written by `python -m benchmarks tables` from `benchmarks/results/`; do not edit. `python -m benchmarks planner` plans
all of it again, on any computer.

How: one training step of each model (`examples/models`) is recorded under FakeTensorMode and priced for a device.
An op takes what its arithmetic or its memory traffic takes, whichever is longer, at the shares of the peaks
that public measurements show, and a launch; [calibration.md](calibration.md) says how near that comes and what
it assumes.
Budgets are floor + h x (plain peak - floor). All times are simulated, all on the same simulator, whose memory is
exact; measured times are in [performance.md](performance.md).

How plans are made: every saved storage that is large enough is kept, swapped or recomputed. Orders in which storages
leave the device (families of prices), the fractions of a linear relaxation, made whole, and every published policy's
choice give starting points; simulated annealing improves them, each trial simulated in full. Each plan
says how far above a proven lower bound it is: what no plan of this runtime goes below, whoever makes it
(`planning/relaxation` holds the proof and says where the bound is loose; another runtime might do better). Policies
are fitted to each budget by all prefixes of their orders ([how](decisions/0027-fair-rivals.md)); auto
starts from some of those, so by construction it is hardly ever beaten.
Where a plan is more than 3% above the bound and candidates are few (VGG-19 near the floor), the bound below is that of
the same program in which no storage leaves in part, which takes half a minute. Planning seconds are CPU time, the bound
included.

In the tables: the step's added time in percent of the plain step, **auto** / lower bound / best published policy.
"""
