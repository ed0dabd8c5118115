"""Does tuning pay? A configured training, the same one with the finder, and the best of a grid, side by side.

Each contest is a job with a training loss to reach. First a grid of batch sizes with some learning rates each is tried
on a seed of its own, one training each, which is given up where the best so far has arrived before. Then, seed by seed,
three trainings follow one another, and who goes first turns from seed to seed: the configured size and rate (*base*),
the same with the finder among the callbacks (*tuned*), and the best of the grid (*best*). The clock runs from `fit` on,
so what tuning takes counts. No memory plan is involved. The held-out samples are looked at after the clock has stopped.

A run is configured to see some times the samples that it takes to the loss, as one that ends at a loss is, and the
finder spends shares of what is configured. It is as it is by default, but for `min_efficiency=0`, which its page gives
for such trainings.

Every training is one :class:`Run`, plain data, so a contest goes on from those that are known.
"""

from __future__ import annotations

import gc
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as L
import torch
from torch import Tensor

from benchmarks.tuner.jobs import Data, Job, Model, Tensors
from benchmarks.tuner.racing import RunningMean
from lightning_offload import EfficientBatchSizeFinder
from lightning_offload.tuning.learning_rate import RULES

__all__ = ["ENTRANTS", "GRID", "Contest", "Run", "best_of_grid", "num_runs", "runs_left"]

ENTRANTS = ("base", "tuned", "best")
GRID = "grid"
_GRID_SEED = 100  # so that the best of the grid is not the best by the luck of a seed that counts
_EVALUATED = 256  # held-out samples at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    """One job, and what the finder is compared with.

    Attributes:
        job: What is trained; a training ends after `num_race_samples` where it has not arrived.
        held_out: Makes the held-out tensors.
        error: Of the model on held-out tensors: the sum over samples, lower is better.
        error_name: Its name and unit.
        sizes: Batch sizes of the grid; none where nothing but the configured values is compared with.
        rate_factors: Rates of the grid, by the rate that the job's rule gives for a size.
        give_up_seconds: After which any training is given up.
        seeds: Of the trainings that are compared.
    """

    job: Job
    held_out: Callable[[], Tensors]
    error: Callable[[torch.nn.Module, Sequence[Tensor]], Tensor]
    error_name: str
    sizes: tuple[int, ...]
    rate_factors: tuple[float, ...]
    give_up_seconds: float
    seeds: tuple[int, ...]

    def grid(self) -> list[tuple[int, float]]:
        """Sizes and rates, the largest size first: the sooner one arrives, the sooner the others are given up."""
        rule, base = RULES[self.job.lr_scaling], self.job.batch_size
        sizes = sorted(self.sizes, reverse=True)
        factors = sorted(self.rate_factors, key=lambda factor: factor != 1)
        return [(size, self.job.lr * rule(size / base) * factor) for size in sizes for factor in factors]

    def config(self) -> dict[str, Any]:
        """Sizes and settings, ready for JSON."""
        own = {name: getattr(self, name) for name in ("error_name", "give_up_seconds")}
        lists = {name: list(getattr(self, name)) for name in ("sizes", "rate_factors", "seeds")}
        return {"title": self.job.title, **self.job.config(), **own, **lists}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One training.

    Attributes:
        contest: Key of the job.
        entrant: "base", "tuned", "best" or "grid".
        seed: Of weights and order.
        batch_size: The size that was trained with.
        lr: The rate.
        has_arrived: Whether the loss was reached.
        seconds: From the start of the fit until then, or until it was given up; what tuning took is part of it.
        training_seconds: The same from the first step on.
        num_steps: Steps until then.
        loss: Mean over the last samples at the end; None where there were too few, or it is not finite.
        held_out_error: At the end; None where it was not asked for, or is not finite.
        load_average: How many processes the machine had to run in the minute before; None where it does not tell.
        note: What the finder said.
    """

    contest: str
    entrant: str
    seed: int
    batch_size: int
    lr: float
    has_arrived: bool
    seconds: float
    training_seconds: float
    num_steps: int
    loss: float | None
    held_out_error: float | None
    load_average: float | None
    note: str = ""


def num_runs(contest: Contest) -> int:
    """The most trainings that a contest takes."""
    return len(contest.grid()) + len(ENTRANTS) * len(contest.seeds)


def best_of_grid(contest: Contest, known: Sequence[Run]) -> tuple[int, float] | None:
    """Size and rate that arrived first; None where none did."""
    arrived = [run for run in _of(contest, known) if run.entrant == GRID and run.has_arrived]
    best = min(arrived, key=lambda run: run.seconds, default=None)
    return None if best is None else (best.batch_size, best.lr)


def runs_left(contest: Contest, known: Sequence[Run]) -> Iterator[Run]:
    """Train what has not been trained yet, one training at a time.

    Args:
        contest: The job.
        known: What was trained before, of this and of other contests.
    """
    done = _of(contest, known)
    for size, lr in contest.grid():
        if any((run.entrant, run.batch_size, run.lr) == (GRID, size, lr) for run in done):
            continue
        fastest = min((run.seconds for run in done if run.has_arrived), default=math.inf)
        done.append(_train(contest, GRID, _GRID_SEED, size, lr, seconds=min(contest.give_up_seconds, fastest)))
        yield done[-1]
    base = (contest.job.batch_size, contest.job.lr)
    best = best_of_grid(contest, done)
    for index, seed in enumerate(contest.seeds):
        for turn in range(len(ENTRANTS)):
            entrant = ENTRANTS[(index + turn) % len(ENTRANTS)]
            if any((run.entrant, run.seed) == (entrant, seed) for run in done):
                continue
            if entrant == "best" and best in (None, base):  # base is timed anyway
                continue
            size, lr = best if entrant == "best" and best is not None else base
            done.append(_train(contest, entrant, seed, size, lr, seconds=contest.give_up_seconds))
            yield done[-1]


def _of(contest: Contest, known: Sequence[Run]) -> list[Run]:
    return [run for run in known if run.contest == contest.job.key]


def _train(contest: Contest, entrant: str, seed: int, size: int, lr: float, *, seconds: float) -> Run:
    job = contest.job
    load_average = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    L.seed_everything(seed, verbose=False)
    model, data = Model(job, lr), Data(job, size, seed)
    finder = (
        EfficientBatchSizeFinder(on_failure="raise", advanced={"min_efficiency": 0.0}) if entrant == "tuned" else None
    )
    watch = _Watch(job, seconds)
    trainer = L.Trainer(
        accelerator="cpu", max_steps=max(1, job.num_race_samples // size), logger=False, enable_checkpointing=False,
        callbacks=[*([finder] if finder is not None else []), watch], enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    gc.collect()  # what the last training left
    watch.began = time.perf_counter()
    trainer.fit(model, datamodule=data)
    result = finder.result if finder is not None else None
    return Run(
        contest=job.key, entrant=entrant, seed=seed, batch_size=data.batch_size,
        lr=lr if result is None or result.lr is None else result.lr, has_arrived=watch.has_arrived,
        seconds=watch.seconds, training_seconds=watch.seconds - watch.tuned, num_steps=watch.num_steps,
        loss=_finite(watch.loss), held_out_error=None if entrant == GRID else _held_out_error(contest, model),
        load_average=load_average,
        note=result.note if result is not None else "",
    )  # fmt: skip


@torch.no_grad()
def _held_out_error(contest: Contest, model: Model) -> float | None:
    """The mean over the held-out samples."""
    tensors = contest.held_out()
    model.eval()
    batches = zip(*(tensor.split(_EVALUATED) for tensor in tensors), strict=True)
    return _finite(sum(float(contest.error(model.network, batch)) for batch in batches) / len(tensors[0]))


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


class _Watch(L.Callback):
    """Ends a training at its loss, or when it is hopeless, and tells when that was.

    Args:
        job: The job.
        most_seconds: When it is given up.
    """

    def __init__(self, job: Job, most_seconds: float) -> None:
        self._job, self._most_seconds = job, most_seconds
        self._mean = RunningMean(job.window, job.batch_size)
        self.began = self.tuned = self.seconds = 0.0
        self.has_arrived = False
        self.num_steps, self.loss = 0, math.inf

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Note what came before, and the size that was found."""
        self.tuned = time.perf_counter() - self.began
        self._mean = RunningMean(self._job.window, trainer.datamodule.batch_size)  # type: ignore[attr-defined]

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Look at the loss and at the clock."""
        loss = float(outputs["loss"].detach())
        mean = self._mean.add(loss)
        self.seconds, self.num_steps = time.perf_counter() - self.began, self.num_steps + 1
        self.loss = self.loss if mean is None else mean
        self.has_arrived = mean is not None and mean <= self._job.target_loss
        is_hopeless = not math.isfinite(loss) or self.seconds > self._most_seconds
        trainer.should_stop = trainer.should_stop or self.has_arrived or is_hopeless
