"""Races to a training loss: the configured batch size and learning rate against the found ones.

Both start from the same seed, so from the same weights and, size apart, the same order of samples, under the same
budget. The loss is the mean over the last samples, as many for both, so that a larger batch is neither favoured for
its smaller scatter nor punished for its fewer steps. The clock runs from the start of the training on: the steps that
record and verify memory plans count, what the finder took does not. Who goes first changes from seed to seed.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as L

from benchmarks.tuner.finding import fit
from benchmarks.tuner.jobs import Data, Job, Model

__all__ = ["Race", "RunningMean", "median_ratio", "race", "ratios"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Race:
    """One training.

    Attributes:
        is_tuned: Whether it had the found size and rate.
        seed: Of weights and order.
        batch_size: The size.
        lr: The rate.
        has_arrived: Whether the loss was reached.
        seconds: Until then, or until it was given up.
        num_steps: Likewise.
        loss: Mean over the last samples at the end.
    """

    is_tuned: bool
    seed: int
    batch_size: int
    lr: float
    has_arrived: bool
    seconds: float
    num_steps: int
    loss: float


class RunningMean:
    """Mean of the losses of the last samples; batches are taken whole, at least one.

    Args:
        window: Samples.
        batch_size: Samples of a batch.
    """

    def __init__(self, window: int, batch_size: int) -> None:
        self._losses: deque[float] = deque(maxlen=max(1, round(window / batch_size)))

    def add(self, loss: float) -> float | None:
        """Add a batch's loss and return the mean; None before the window is full."""
        self._losses.append(loss)
        return statistics.fmean(self._losses) if len(self._losses) == self._losses.maxlen else None


def race(
    job: Job, budget_bytes: int, *, tuned: tuple[int, float], seeds: Sequence[int], advance: Callable[[], None]
) -> list[Race]:
    """Run both trainings for each seed.

    Args:
        job: What is trained.
        budget_bytes: Of the memory plans.
        tuned: Found size and rate.
        seeds: One pair of trainings each.
        advance: Called after each training.
    """
    found = []
    for index, seed in enumerate(seeds):
        for is_tuned in (False, True) if index % 2 == 0 else (True, False):
            size, lr = tuned if is_tuned else (job.batch_size, job.lr)
            found.append(_run(job, budget_bytes, size, lr, seed=seed, is_tuned=is_tuned))
            advance()
    return found


def _run(job: Job, budget_bytes: int, size: int, lr: float, *, seed: int, is_tuned: bool) -> Race:
    L.seed_everything(seed, verbose=False)
    watch = _Watch(job, size)
    max_steps = max(1, job.num_race_samples // size)
    fit(Model(job, lr), Data(job, size, seed), budget=f"{budget_bytes}B", max_steps=max_steps, callbacks=(watch,))
    return Race(
        is_tuned=is_tuned, seed=seed, batch_size=size, lr=lr, has_arrived=watch.has_arrived, seconds=watch.seconds,
        num_steps=watch.num_steps, loss=watch.loss,
    )  # fmt: skip


class _Watch(L.Callback):
    """Ends a training at its loss, and tells when that was."""

    def __init__(self, job: Job, size: int) -> None:
        self._mean, self._target = RunningMean(job.window, size), job.target_loss
        self._start = 0.0
        self.has_arrived = False
        self.seconds, self.num_steps, self.loss = 0.0, 0, float("inf")

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start the clock."""
        self._start = time.perf_counter()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Look at the loss."""
        if self.has_arrived:
            return
        mean = self._mean.add(float(outputs["loss"].detach()))
        self.seconds, self.num_steps = time.perf_counter() - self._start, self.num_steps + 1
        if mean is not None:
            self.loss = mean
            trainer.should_stop = self.has_arrived = mean <= self._target


def ratios(races: Sequence[Race]) -> list[float]:
    """Seconds of the tuned training over those of the other, for each seed that both arrived with."""
    pairs: dict[int, dict[bool, Race]] = {}
    for one in races:
        pairs.setdefault(one.seed, {})[one.is_tuned] = one
    both = [pair for pair in pairs.values() if len(pair) == 2 and all(one.has_arrived for one in pair.values())]
    return [pair[True].seconds / pair[False].seconds for pair in both]


def median_ratio(races: Sequence[Race]) -> float | None:
    """The median of the ratios; None where there is none."""
    found = ratios(races)
    return statistics.median(found) if found else None
