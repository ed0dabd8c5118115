"""The planner against its bound and against every policy: 8 models, 5 devices, 2 types, 5 budgets, on one simulator.

No device is needed. `--quick` plans one small cell. Cells are planned in as many processes as there are cores, which
takes some hours; after `--minutes M` no further model is begun, and the next call goes on from there. It begins anew
with `--fresh`, or where what makes plans has changed since.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import Progress

from benchmarks.environment import digest_of
from benchmarks.planner.cells import BEATEN, DEVICES, HEIGHTS, MODEL_NAMES, Cell, cells
from benchmarks.planner.page import DOCUMENT, page
from benchmarks.results import RESULTS_FOLDER, Measurements, Options, Row, error_row, result_path

__all__ = ["DOCUMENT", "TITLE", "page", "run"]

TITLE = "Planner"
_MAKE_PLANS = ("lightning_offload/graph", "lightning_offload/planning", "lightning_offload/capture", "examples/models")
_CLOSE, _NEAR, _TIGHT = 1.01, 1.03, 1.05
_PROMPT = {"resnet152": 1.0}  # seconds of CPU time in which its plans should be made
_LOW = 0.2  # height from which on plans should be close to the bound
_Pair = tuple[str, str, str, tuple[float, ...], int | None]


def run(options: Options, progress: Progress) -> Measurements:
    """Plan all cells, or go on where the last run stopped; a model that cannot be recorded gives an error row."""
    pairs: list[_Pair] = [(model, *device, HEIGHTS, None) for model in MODEL_NAMES for device in DEVICES]
    if options.quick:
        pairs = [("resnet50", "k40c", "float32", (0.5,), 2)]
    code = code_digest()
    path = result_path("planner", "cpu", options.folder or RESULTS_FOLDER)
    found = {} if options.fresh or options.quick else _stored(path, code, pairs)
    failures: dict[str, str] = {}
    bar = progress.add_task("planner", total=len(pairs), completed=len(found))
    todo = iter([pair for pair in pairs if pair not in found])
    deadline = time.monotonic() + 60 * (math.inf if options.minutes is None else options.minutes)
    num_workers = min(len(pairs), os.cpu_count() or 1)
    with ProcessPoolExecutor(num_workers, mp_context=get_context("spawn")) as pool:
        running = {pool.submit(_cells, pair): pair for pair in itertools.islice(todo, num_workers)}
        while running:
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                pair = running.pop(future)
                model, device, dtype, *_ = pair
                progress.update(bar, description=f"{model}, {device} {dtype}")
                error = future.exception()
                if error is None:
                    found[pair] = future.result()
                else:
                    failures[f"{model}, {device} {dtype}"] = f"{type(error).__name__}: {error}"
                progress.advance(bar)
                following = next(todo, None) if time.monotonic() < deadline else None
                if following is not None:
                    running[pool.submit(_cells, following)] = following
    ordered = [cell for pair in pairs for cell in found.get(pair, [])]
    return Measurements(
        rows=[*_summary(ordered), *(row for cell in ordered for row in _rows(cell)), *map(error_row, failures)],
        config={
            "cells": [asdict(cell) for cell in ordered],
            "code": code,
            "num_left": len(pairs) - len(found) - len(failures),
        },
        repeats=1,
        notes=failures,
    )


def code_digest() -> str:
    """What tells whether cells were planned by this very code: then they are what they would be now."""
    return digest_of(*_MAKE_PLANS)


def _stored(path: Path, code: str, pairs: Sequence[_Pair]) -> dict[_Pair, list[Cell]]:
    """What an earlier run has planned whole, if it was by the same code."""
    if not path.exists():
        return {}
    config = json.loads(path.read_text(encoding="utf-8"))["config"]
    if config.get("code") != code:
        return {}
    by_pair: dict[tuple[str, str, str], list[Cell]] = {}
    for data in config["cells"]:
        cell = Cell(**data)
        by_pair.setdefault((cell.model, cell.device, cell.dtype), []).append(cell)
    return {pair: by_pair[pair[:3]] for pair in pairs if len(by_pair.get(pair[:3], ())) == len(pair[3])}


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
    for model, goal in _PROMPT.items():
        if seconds := [cell.planning_seconds for cell in found if cell.model == model]:
            case = f"all cells of {model}"
            yield Row(case=case, metric="planning_seconds_median", value=float(np.median(seconds)), goal=goal)
            yield Row(case=case, metric="planning_seconds_most", value=max(seconds), goal=goal)
