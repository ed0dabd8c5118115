"""Throughput and peak of training steps over batch sizes, measured without the finder.

All sizes take part in one fit under the offload strategy, so they share one model and one process. Each is first
trained until its plan is final, then one step's live bytes are counted by a tracker that asks the library nothing, and
then come rounds: in each round every size runs a step that is not timed and a few that are, in an order that turns from
round to round. A slow drift of the machine thus meets all sizes alike.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import lightning.pytorch as L
import torch
from torch import Tensor

from benchmarks.tuner.finding import fit
from benchmarks.tuner.jobs import Job, Model
from examples.demo.measurement import persistent_tensors
from examples.demo.tracker import CudaPeak, LiveStorageTracker, peak_tracker
from lightning_offload.errors import BudgetInfeasibleError

__all__ = ["Measured", "grid_sizes", "measure"]

_NUM_LEARNING_STEPS = 6
_Schedule = list[tuple[int, Literal["learn", "track", "warm", "time"]]]
"""Size of each step, and what the step is for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What was measured of a batch size.

    Attributes:
        batch_size: Samples of a step.
        step_seconds: Durations of steps, optimizer included, by round.
        peak_bytes: Most bytes alive in forward and backward.
        recomputed_bytes: Saved bytes that the plan recomputes.
        swapped_bytes: Saved bytes that it swaps.
        is_planned: Whether the plan was final in all timed steps.
    """

    batch_size: int
    step_seconds: tuple[tuple[float, ...], ...]
    peak_bytes: int
    recomputed_bytes: int
    swapped_bytes: int
    is_planned: bool

    @property
    def round_seconds(self) -> list[float]:
        """The median step of each round."""
        return [statistics.median(steps) for steps in self.step_seconds]

    @property
    def samples_per_second(self) -> float:
        """Of the median over rounds."""
        return self.batch_size / statistics.median(self.round_seconds)


def grid_sizes(smallest: int, largest: int, others: Sequence[int]) -> list[int]:
    """List powers of two and those times 1.5, with others, from the smallest to the largest size."""
    powers = [1 << power for power in range(largest.bit_length())]
    found = {*powers, *(3 * power // 2 for power in powers if power > 1), *others, largest}
    return sorted(size for size in found if smallest <= size <= largest)


def measure(
    job: Job, budget_bytes: int, sizes: Sequence[int], *, num_rounds: int, num_steps: int
) -> tuple[list[Measured], list[int]]:
    """Measure a job at some sizes.

    Args:
        job: What is trained.
        budget_bytes: Of the memory plans.
        sizes: Batch sizes, ascending.
        num_rounds: Rounds.
        num_steps: Steps timed of each size in a round.

    Returns:
        What was measured by size, and the sizes that no plan could be made for.
    """
    left, infeasible = list(sizes), []
    while left:
        schedule = _schedule(left, num_rounds, num_steps)
        meter = _Meter(schedule)
        L.seed_everything(0, verbose=False)
        try:
            fit(Model(job), _Batches(job, schedule), budget=f"{budget_bytes}B", max_epochs=1, callbacks=(meter,))
        except BudgetInfeasibleError:
            failed = meter.size
            infeasible += [size for size in left if size >= failed]
            left = [size for size in left if size < failed]
        else:
            return meter.measured(), sorted(infeasible)
    return [], sorted(infeasible)


def _schedule(sizes: Sequence[int], num_rounds: int, num_steps: int) -> _Schedule:
    """Say which step is of which size, and what it is for; the largest size is learned first, as it may fail."""
    schedule: _Schedule = [(sizes[0], "learn")]  # the optimizer makes its state
    for size in reversed(sizes):
        schedule.extend((size, "learn") for _ in range(_NUM_LEARNING_STEPS))
        schedule.append((size, "track"))
    for turn in range(num_rounds):
        first = turn % len(sizes)
        order = [*sizes[first:], *sizes[:first]]
        for size in order if turn % 2 == 0 else reversed(order):
            schedule.append((size, "warm"))
            schedule.extend((size, "time") for _ in range(num_steps))
    return schedule


class _Batches:
    """The batches of a schedule: a job's first samples, repeated where there are too few."""

    def __init__(self, job: Job, schedule: _Schedule) -> None:
        self._tensors, self._schedule = job.tensors(), schedule

    def __len__(self) -> int:
        return len(self._schedule)

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        for size, _ in self._schedule:
            yield tuple(_first(tensor, size) for tensor in self._tensors)


def _first(tensor: Tensor, size: int) -> Tensor:
    """Copy the first samples: a view would count with the storage of the whole data set."""
    return tensor[torch.arange(size) % len(tensor)]


@dataclass
class _Notes:
    """What is noted of one size."""

    rounds: list[list[float]] = field(default_factory=list)
    peak_bytes: int = 0
    recomputed_bytes: int = 0
    swapped_bytes: int = 0
    is_planned: bool = True


class _Meter(L.Callback):
    """Measures the steps of a schedule."""

    def __init__(self, schedule: _Schedule) -> None:
        self._schedule = schedule
        self._notes: dict[int, _Notes] = {}
        self._tracking = contextlib.ExitStack()
        self._tracker: LiveStorageTracker | CudaPeak | None = None
        self._start = 0.0
        self.size = 0
        """Size of the step that runs, or ran last."""

    def measured(self) -> list[Measured]:
        """What was measured, by size."""
        return [
            Measured(
                batch_size=size,
                step_seconds=tuple(tuple(steps) for steps in note.rounds),
                peak_bytes=note.peak_bytes,
                recomputed_bytes=note.recomputed_bytes,
                swapped_bytes=note.swapped_bytes,
                is_planned=note.is_planned,
            )
            for size, note in sorted(self._notes.items())
        ]

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Start counting, or the clock."""
        self.size, role = self._schedule[batch_idx]
        note = self._notes.setdefault(self.size, _Notes())
        if role == "track":
            self._tracker = self._tracking.enter_context(peak_tracker(pl_module.device))
            self._tracker.add([*persistent_tensors(trainer, pl_module), *batch])
        elif role == "warm":
            note.rounds.append([])
        self._start = time.perf_counter()

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
        """Stop counting: a budget is about forward and backward."""
        self._tracking.close()
        if self._tracker is not None:
            self._notes[self.size].peak_bytes = self._tracker.peak_bytes
            self._tracker = None

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Stop the clock."""
        seconds = time.perf_counter() - self._start
        note = self._notes[self.size]
        if self._schedule[batch_idx][1] != "time":
            return
        report = trainer.strategy.memory.report(of_last=True)  # type: ignore[attr-defined]
        note.rounds[-1].append(seconds)
        note.is_planned &= report.phase == "planned"
        note.recomputed_bytes, note.swapped_bytes = report.recomputed_bytes, report.swapped_bytes

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Leave no dispatch mode behind when a step fails."""
        self._tracking.close()
