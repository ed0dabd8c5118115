"""The tuner on this CPU: is the batch size that it finds right, how well is it predicted, and does it pay?

Two jobs (`benchmarks.tuner.jobs`): the finder under a budget at which plain training ends at a small size, the curve
that it had to judge, measured apart from it, and races to a training loss. Then searches on modules that sleep, whose
curves are known. Other work on the machine makes the figures worthless: run it alone. `--quick` tries tiny models.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from rich.progress import Progress, TaskID

from benchmarks.results import Measurements, Options, error_row
from benchmarks.tuner import finding, grid, pictures, racing, sleeping
from benchmarks.tuner.jobs import Job, jobs, quick_jobs
from benchmarks.tuner.judging import MUCH_SMALLER
from benchmarks.tuner.page import DOCUMENT, page
from benchmarks.tuner.records import Record, job_rows, sleeping_rows, spread_of
from lightning_offload.callbacks.tuning.result import TuningResult
from lightning_offload.demo.training import quiet_lightning

__all__ = ["DOCUMENT", "TITLE", "page", "run"]

TITLE = "Tuner"
_PICTURES = "pictures"
_NUM_PREPARATIONS = 3  # budget, finder, grid


@dataclass(frozen=True, slots=True, kw_only=True)
class _Effort:
    """How much is done.

    Attributes:
        num_rounds: Of the grid.
        num_steps: Timed in a round, of each size.
        seeds: Of the races.
        num_searches: On each shape of sleeping modules.
    """

    num_rounds: int
    num_steps: int
    seeds: tuple[int, ...]
    num_searches: int


_FULL = _Effort(num_rounds=6, num_steps=2, seeds=(0, 1, 2), num_searches=10)
_QUICK = _Effort(num_rounds=2, num_steps=1, seeds=(0,), num_searches=1)


def run(options: Options, progress: Progress) -> Measurements:
    """Measure all; a job that fails gives an error row and a note, and the others go on.

    Raises:
        ValueError: Another device than the CPU is meant.
    """
    if options.device not in (None, "cpu") or (options.device is None and torch.cuda.is_available()):
        raise ValueError("the suite tuner measures on the CPU: give --device cpu")
    effort, todo = (_QUICK, quick_jobs()) if options.quick else (_FULL, jobs())
    load_average = _load_average()
    gc.collect()  # what others left behind is beside the first job's steps, and beside none of its grid
    records, failures = [], {}
    with quiet_lightning():
        for job in todo:
            bar = progress.add_task(job.title, total=_NUM_PREPARATIONS + 2 * len(effort.seeds))
            try:
                records.append(_record(job, effort, progress, bar))
            except Exception as error:  # the rest is of use without this one
                failures[job.title] = f"{type(error).__name__}: {error}"
    outcomes = _sleep(effort, progress)
    notes = {**failures, **_errors_of(outcomes)}
    if not options.quick:
        with _noting(notes, _PICTURES):
            pictures.draw(records, options.folder or pictures.PICTURES_FOLDER)
    return Measurements(
        rows=[
            *(row for record in records for row in job_rows(record)),
            *sleeping_rows(outcomes),
            *map(error_row, failures),
        ],
        config={
            "jobs": [record.encoded() for record in records],
            "sleeping": [outcome.encoded() for outcome in outcomes],
            "load_average": load_average,
        },
        repeats=effort.num_rounds * effort.num_steps,
        spread={record.title: spread_of(record) for record in records},
        notes=notes,
    )


def _record(job: Job, effort: _Effort, progress: Progress, bar: TaskID) -> Record:
    """Tune a job, measure around what was found, and race."""
    advance = functools.partial(progress.advance, bar)
    progress.update(bar, description=f"{job.title}: the finder")
    budget_bytes = finding.budget_of(job)
    advance()
    result, tuning_seconds = finding.find(job, budget_bytes)
    advance()
    progress.update(bar, description=f"{job.title}: throughput")
    measured, infeasible = grid.measure(
        job, budget_bytes, _sizes(job, result), num_rounds=effort.num_rounds, num_steps=effort.num_steps
    )
    if result.batch_size not in {found.batch_size for found in measured}:
        raise RuntimeError(f"{result.batch_size} was chosen, but no plan was possible for {infeasible}")
    advance()
    progress.update(bar, description=f"{job.title}: time to a loss")
    assert result.lr is not None  # the model has one
    races = racing.race(
        job, budget_bytes, tuned=(result.batch_size, result.lr), seeds=effort.seeds, advance=advance
    )  # fmt: skip
    return Record(
        key=job.key, title=job.title, tolerance=finding.TOLERANCE, config=job.config(), result=result,
        tuning_seconds=tuning_seconds, measured=tuple(measured), infeasible=tuple(infeasible), races=tuple(races),
    )  # fmt: skip


def _sizes(job: Job, result: TuningResult) -> list[int]:
    """Sizes up to the largest that fits, those among them that say whether the choice is right."""
    tried = [trial.batch_size for trial in result.trials if trial.is_ok]
    largest = max([*tried, result.largest_size or 0])
    much_smaller = math.ceil(MUCH_SMALLER * result.batch_size) - 1
    smallest = min([*tried, job.batch_size, 2])
    return grid.grid_sizes(max(2, smallest), largest, [*tried, result.batch_size, much_smaller, job.batch_size])


def _sleep(effort: _Effort, progress: Progress) -> list[sleeping.Outcome]:
    bar = progress.add_task("sleeping modules", total=effort.num_searches * len(sleeping.SHAPES))
    overhead_seconds = sleeping.measure_overhead()
    outcomes = []
    for seed in range(effort.num_searches):
        for shape in sleeping.SHAPES:
            tolerance = finding.TOLERANCE
            outcomes.append(sleeping.search(shape, seed, tolerance=tolerance, overhead_seconds=overhead_seconds))
            progress.advance(bar)
    return sorted(outcomes, key=lambda outcome: sleeping.SHAPES.index(outcome.shape))


def _errors_of(outcomes: Sequence[sleeping.Outcome]) -> dict[str, str]:
    return {f"sleeping modules, {o.shape}, seed {o.seed}": o.error for o in outcomes if o.error}


@contextlib.contextmanager
def _noting(notes: dict[str, str], name: str) -> Iterator[None]:
    """Turn an error inside into a note: figures are worth keeping without their pictures."""
    try:
        yield
    except Exception as error:
        notes[name] = f"{type(error).__name__}: {error}"


def _load_average() -> float | None:
    """How many processes ran in the last minute: what else the machine had to do; None where it does not tell."""
    read: Callable[[], tuple[float, float, float]] | None = getattr(os, "getloadavg", None)
    return read()[0] if read is not None else None
