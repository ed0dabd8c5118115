"""The planner against its bound and against every policy: 8 models, 5 devices, 2 types, 5 budgets, on one simulator.

No device is needed. `--quick` plans one small cell. Cells are planned in as many processes as there are cores.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from typing import Any

import numpy as np
from rich.progress import Progress

from benchmarks.planner.cells import BEATEN, DEVICES, HEIGHTS, MODEL_NAMES, Cell, cells
from benchmarks.planner.page import DOCUMENT, page
from benchmarks.results import Measurements, Options, Row, error_row

__all__ = ["DOCUMENT", "TITLE", "page", "run"]

TITLE = "Planner"
_CLOSE, _NEAR, _TIGHT = 1.01, 1.03, 1.05
_LOW = 0.2  # height from which on plans should be close to the bound
_Pair = tuple[str, str, str, tuple[float, ...], int | None]


def run(options: Options, progress: Progress) -> Measurements:
    """Plan all cells; a model that cannot be recorded gives an error row, and the others go on."""
    pairs: list[_Pair] = [(model, *device, HEIGHTS, None) for model in MODEL_NAMES for device in DEVICES]
    if options.quick:
        pairs = [("resnet50", "k40c", "float32", (0.5,), 2)]
    bar = progress.add_task("planner", total=len(pairs))
    found: dict[_Pair, list[Cell]] = {}
    failures: dict[str, str] = {}
    with ProcessPoolExecutor(min(len(pairs), os.cpu_count() or 1), mp_context=get_context("spawn")) as pool:
        futures = {pool.submit(_cells, pair): pair for pair in pairs}
        for future in as_completed(futures):
            model, device, dtype, *_ = futures[future]
            progress.update(bar, description=f"{model}, {device} {dtype}")
            error = future.exception()
            if error is None:
                found[futures[future]] = future.result()
            else:
                failures[f"{model}, {device} {dtype}"] = f"{type(error).__name__}: {error}"
            progress.advance(bar)
    ordered = [cell for pair in pairs for cell in found.get(pair, [])]
    return Measurements(
        rows=[*_summary(ordered), *(row for cell in ordered for row in _rows(cell)), *map(error_row, failures)],
        config={"cells": [cell.encoded() for cell in ordered], "is_calibrated": True},
        repeats=1,
        notes=failures,
    )


def _cells(pair: _Pair) -> list[Cell]:
    return list(cells(*pair))


def _rows(cell: Cell) -> Iterable[Row]:
    goal = _NEAR if cell.height >= _LOW else _TIGHT
    yield Row(case=cell.name, metric="auto_over_bound", value=cell.over_bound, goal=goal)
    if cell.over_best_policy is not None:
        yield Row(case=cell.name, metric="auto_over_best_policy", value=cell.over_best_policy, goal=BEATEN)
    figures: dict[str, Any] = {
        "budget_bytes": cell.budget_bytes,
        "plain_step_seconds": cell.plain_seconds,
        "bound_step_seconds": cell.bound_seconds,
        "auto_step_seconds": cell.policy_seconds["auto"],
        "planning_seconds": cell.planning_seconds,
        "num_feasible_policies": len(cell.policy_seconds),
    }
    yield from (Row(case=cell.name, metric=metric, value=float(value)) for metric, value in figures.items())


def _summary(found: list[Cell]) -> Iterable[Row]:
    for name, chosen in {
        f"all cells with h >= {_LOW:g}": [cell for cell in found if cell.height >= _LOW],
        f"all cells with h < {_LOW:g}": [cell for cell in found if cell.height < _LOW],
    }.items():
        if not chosen:
            continue
        ratios = [cell.over_bound for cell in chosen]
        lost = [cell for cell in chosen if (cell.over_best_policy or 0.0) > BEATEN]
        is_low = chosen[0].height < _LOW
        yield Row(case=name, metric="auto_over_bound_median", value=float(np.median(ratios)))
        yield Row(
            case=name, metric="auto_over_bound_90th_percentile", value=float(np.quantile(ratios, 0.9)),
            goal=None if is_low else _CLOSE,
        )  # fmt: skip
        yield Row(case=name, metric="auto_over_bound_most", value=max(ratios), goal=_TIGHT if is_low else _NEAR)
        yield Row(case=name, metric="num_cells_lost_to_a_policy", value=float(len(lost)), goal=0.0)
        yield Row(case=name, metric="num_cells", value=float(len(chosen)))
