"""The tuner on this CPU: is the batch size that it finds right, how well is it predicted, and does it pay?

Two jobs (`benchmarks.tuner.jobs`): the finder under a budget at which plain training ends at a small size, the curve
that it had to judge, measured apart from it, and races to a training loss. Then searches on modules that sleep, whose
curves are known, and contests, tuning included, of the finder with the configured values and with the best of a grid
(`benchmarks.tuner.contests`). Other work on the machine makes the figures worthless: run it alone. It takes ten minutes
and up to an hour more for the contests; what is measured is stored at once, after `--minutes M` nothing further is
begun, and the next call goes on from there. It begins anew with `--fresh`, or where the tuner's code has changed since.
`--quick` tries tiny models.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress, TaskID

from benchmarks import environment
from benchmarks.results import RESULTS_FOLDER, Measurements, Options, error_row, result_path, write_result
from benchmarks.tuner import finding, grid, pictures, racing, sleeping
from benchmarks.tuner.contest_jobs import contests, quick_contests
from benchmarks.tuner.contest_rows import contest_rows
from benchmarks.tuner.contests import Contest, Run, num_runs, runs_left
from benchmarks.tuner.jobs import Job, jobs, quick_jobs
from benchmarks.tuner.judging import MUCH_SMALLER
from benchmarks.tuner.page import DOCUMENT, page
from benchmarks.tuner.records import Record, job_rows, sleeping_rows, spread_of
from examples.demo.training import quiet_lightning
from lightning_offload.callbacks.tuning.result import TuningResult

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


_MEASURES = (
    "lightning_offload/tuning",
    "lightning_offload/callbacks",
    "benchmarks/tuner",
    "benchmarks/suites/tuner.py",
)


@dataclass(slots=True, kw_only=True)
class _Known:
    """What is measured so far.

    Attributes:
        effort: How much is done.
        code: Digest of the code that measures.
        contests: All of them.
        path: Where it is stored after each measurement; None for nowhere.
        described: The machine and the versions.
        records: Of the jobs.
        outcomes: Of sleeping modules.
        runs: Of the contests.
        failures: Why what could not be measured was not, by name.
        load_average: When the first measurement began.
    """

    effort: _Effort
    code: str
    contests: tuple[Contest, ...]
    path: Path | None
    described: dict[str, Any]
    records: list[Record] = field(default_factory=list)
    outcomes: list[sleeping.Outcome] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    load_average: float | None = None

    def load(self) -> None:
        """Take over what the file holds, if it was measured by the same code."""
        if self.path is None or not self.path.exists():
            return
        config = json.loads(self.path.read_text(encoding="utf-8"))["config"]
        if config.get("code") != self.code:
            return
        self.records = [Record.decoded(data) for data in config["jobs"]]
        self.outcomes = [sleeping.Outcome(**data) for data in config["sleeping"]]
        self.runs = [Run(**data) for data in config["contest_runs"]]
        self.load_average = config["load_average"]

    def keep(self) -> None:
        """Store what there is."""
        if self.path is not None:
            write_result(self.path, "tuner", "cpu", self.measured(), self.described)

    def measured(self) -> Measurements:
        """All of it, as a suite returns it."""
        configs = [{"key": contest.job.key, **contest.config()} for contest in self.contests]
        return Measurements(
            rows=[
                *(row for record in self.records for row in job_rows(record)),
                *(sleeping_rows(self.outcomes) if self.outcomes else ()),
                *contest_rows(self.runs, configs),
                *map(error_row, self.failures),
            ],
            config={
                "jobs": [record.encoded() for record in self.records],
                "sleeping": [asdict(outcome) for outcome in self.outcomes],
                "contests": configs,
                "contest_runs": [asdict(run) for run in self.runs],
                "load_average": self.load_average,
                "code": self.code,
            },
            repeats=self.effort.num_rounds * self.effort.num_steps,
            spread={record.title: spread_of(record) for record in self.records},
            notes={**self.failures, **_errors_of(self.outcomes)},
        )


def run(options: Options, progress: Progress) -> Measurements:
    """Measure all, or go on where the last run stopped; a job that fails gives an error row and a note.

    Raises:
        ValueError: Another device than the CPU is meant.
    """
    if options.device not in (None, "cpu") or (options.device is None and torch.cuda.is_available()):
        raise ValueError("the suite tuner measures on the CPU: give --device cpu")
    is_stored = not options.quick or options.folder is not None
    known = _Known(
        effort=_QUICK if options.quick else _FULL,
        code=environment.digest_of(*_MEASURES) + ("-quick" if options.quick else ""),
        contests=quick_contests() if options.quick else contests(),
        path=result_path("tuner", "cpu", options.folder or RESULTS_FOLDER) if is_stored else None,
        described=environment.describe("cpu"),
        load_average=_load_average(),
    )
    if not options.fresh:
        known.load()
    ends = time.monotonic() + 60 * (math.inf if options.minutes is None else options.minutes)
    gc.collect()  # what others left behind is beside the first job's steps, and beside none of its grid
    with quiet_lightning():
        for measure in (_measure_jobs, _measure_sleeping, _measure_contests):
            measure(known, quick_jobs() if options.quick else jobs(), progress, ends)
    measured = known.measured()
    if not options.quick:
        with _noting(measured.notes, _PICTURES):
            pictures.draw(known.records, options.folder or pictures.PICTURES_FOLDER)
    return measured


def _measure_jobs(known: _Known, todo: Sequence[Job], progress: Progress, ends: float) -> None:
    """The finder, the curve and the races of each job."""
    for job in todo:
        if any(record.key == job.key for record in known.records) or time.monotonic() >= ends:
            continue
        bar = progress.add_task(job.title, total=_NUM_PREPARATIONS + 2 * len(known.effort.seeds))
        try:
            known.records.append(_record(job, known.effort, progress, bar))
        except Exception as error:  # the rest is of use without this one
            known.failures[job.title] = f"{type(error).__name__}: {error}"
        known.keep()


def _measure_sleeping(known: _Known, _: Sequence[Job], progress: Progress, ends: float) -> None:
    if not known.outcomes and time.monotonic() < ends:
        known.outcomes = _sleep(known.effort, progress)
        known.keep()


def _measure_contests(known: _Known, _: Sequence[Job], progress: Progress, ends: float) -> None:
    """Training after training, each stored when it ends."""
    for contest in known.contests:
        done = sum(run.contest == contest.job.key for run in known.runs)
        bar = progress.add_task(contest.job.title, total=num_runs(contest), completed=done)
        left = runs_left(contest, known.runs)
        try:
            while time.monotonic() < ends and (found := next(left, None)) is not None:
                known.runs.append(found)
                known.keep()
                progress.advance(bar)
        except Exception as error:
            known.failures[contest.job.title] = f"{type(error).__name__}: {error}"


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
