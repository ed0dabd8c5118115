"""The finder at work: in Lightning's Trainer, with the offload strategy, under a job's budget."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as L
from rich import get_console

from benchmarks.tuner.jobs import Data, Job, Model
from lightning_offload import EfficientBatchSizeFinder, OffloadStrategy
from lightning_offload.callbacks.tuning.result import TuningResult

__all__ = ["TOLERANCE", "budget_of", "find", "fit"]

TOLERANCE = 0.03
"""The finder's default."""

_NUM_PROBE_STEPS = 4  # recorded, verified, measured, planned


def fit(
    model: L.LightningModule,
    data: Any,
    *,
    budget: str,
    max_steps: int = -1,
    max_epochs: int = -1,
    callbacks: tuple[L.Callback, ...] = (),
) -> OffloadStrategy:
    """Train on the CPU within a budget; `data` is a datamodule or an iterable of batches.

    Returns:
        The strategy, of whose `memory` a report can be asked.
    """
    strategy = OffloadStrategy(budget=budget)
    trainer = _trainer(strategy, max_steps=max_steps, max_epochs=max_epochs, callbacks=callbacks)
    try:
        if isinstance(data, L.LightningDataModule):
            trainer.fit(model, datamodule=data)
        else:
            trainer.fit(model, data)
    finally:
        del trainer
        gc.collect()  # trainer and module refer to each other; the next run should find the memory free
    return strategy


def budget_of(job: Job) -> int:
    """Return the job's budget: the peak of its plain step at `plain_size`, in bytes."""
    L.seed_everything(0, verbose=False)
    probe = _Probe()
    data = Data(job, job.plain_size)
    fit(Model(job), data, budget="1TiB", max_steps=_NUM_PROBE_STEPS, callbacks=(probe,))
    if probe.plain_peak_bytes is None:
        raise RuntimeError(f"{job.title}: no peak of the plain step is known; is LIGHTNING_OFFLOAD=0 set?")
    return probe.plain_peak_bytes


def find(job: Job, budget_bytes: int) -> tuple[TuningResult, float]:
    """Tune a job, by throughput alone and without what keeps a run from being worse: it is the search that is judged.

    Returns:
        What was found, and the seconds that it took, recording, planning and restoring included.
    """
    L.seed_everything(0, verbose=False)
    model, data = Model(job), Data(job)
    finder = EfficientBatchSizeFinder(
        lr_scaling=job.lr_scaling, objective="throughput",
        advanced={
            "tolerance": TOLERANCE, "max_data_share": 1.0, "min_confidence": 0.0, "max_lr_factor": float("inf"),
            "lr_warmup_steps": 0,
        },
    )  # fmt: skip
    strategy = OffloadStrategy(budget=f"{budget_bytes}B")
    trainer = _trainer(strategy, max_steps=-1, max_epochs=1, callbacks=(finder,))
    with _silent_console():
        start = time.perf_counter()
        result = finder.tune(trainer, model, data)
        seconds = time.perf_counter() - start
    if (data.batch_size, model.lr) != (result.batch_size, result.lr):
        raise RuntimeError(f"{job.title}: {result.batch_size} and {result.lr} were found, but not set")
    return result, seconds


class _Probe(L.Callback):
    """Reads the plain step's peak while the plugin is attached."""

    plain_peak_bytes: int | None = None

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.plain_peak_bytes = trainer.strategy.memory.report(of_last=True).plain_peak_bytes  # type: ignore[attr-defined]


def _trainer(strategy: Any, *, max_steps: int, max_epochs: int, callbacks: tuple[L.Callback, ...]) -> L.Trainer:
    return L.Trainer(
        accelerator="cpu", strategy=strategy, max_steps=max_steps, max_epochs=max_epochs, callbacks=list(callbacks),
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip


@contextlib.contextmanager
def _silent_console() -> Iterator[None]:
    """Keep the finder's table off standard output, which a caller may want to parse."""
    console = get_console()
    was_quiet, console.quiet = console.quiet, True
    try:
        yield
    finally:
        console.quiet = was_quiet
