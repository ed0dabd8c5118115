"""All runs of one training with a finder of the batch size: plain, with its defaults, and for throughput.

Each in a fork, with the same seed, on more data than the runs within budgets have: a step sees a tenth of a data set at
most. What the finder takes is clocked from outside too, from `setup` to the first batch.
"""

from __future__ import annotations

import dataclasses
import importlib
import time
import traceback
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from typing_extensions import override

from benchmarks.clients.judging_sizes import DEFAULTS, LONG, MOST_SECONDS, PLAIN, THROUGHPUT
from benchmarks.clients.runs import Run, first_line, fork, seed
from benchmarks.clients.watching import note_end, watching


def measure(
    device: torch.device,
    *,
    quick: bool,
    name: str,
    packages: Sequence[str],
    times: int,
    long_times: int,
    has_size: bool,
) -> dict[str, Any]:
    """Make all runs of the training of a module, for `benchmarks.gpu.child`.

    Args:
        device: Not used.
        quick: Not used.
        name: Of the module. Its `search` takes the finder's options, or its `train` the callback.
        packages: The distributions that it needs.
        times: How much data there is, by that of a run within a budget.
        long_times: The same of one more run with defaults; 0 for none.
        has_size: Whether a finder can set its batch size.

    Returns:
        Ready for JSON: `missing`, what could not be imported; or `versions` of the packages and `runs` by label.
    """
    try:
        training = importlib.import_module(f"benchmarks.clients.trainings.{name}")
    except ImportError as error:
        return {"missing": first_line(error)}
    options: dict[str, tuple[dict[str, Any] | None, int]] = {PLAIN: (None, times), DEFAULTS: ({}, times)}
    if not hasattr(training, "search"):  # which is for throughput by default
        options[THROUGHPUT] = {"objective": "throughput", "max_seconds": MOST_SECONDS}, times
    if long_times:
        options[LONG] = {}, long_times
    runs = {
        label: dataclasses.asdict(fork(lambda folder, given=given: _run(training, folder, *given)))
        for label, given in options.items()
    }
    return {
        "versions": {package: metadata.version(package) for package in packages},
        "runs": runs,
        "has_size": has_size,
    }


def _run(training: Any, folder: Path, options: dict[str, Any] | None, times: int) -> Run:
    seed()
    train = _search if hasattr(training, "search") else _fit
    tuned: dict[str, Any] = {"is_over": False, "result": None}
    with watching(counts=False) as seen:
        try:
            trained = train(training, options, folder, times, tuned)
        except Exception as error:
            traceback.print_exc()
            return Run(state="error", message=first_line(error), seen=seen, tuned=tuned)
        note_end(seen, trained)
    return Run(state="done", seen=seen, tuned=tuned)


def _search(training: Any, options: Any, folder: Path, times: int, tuned: dict[str, Any]) -> Any:
    began = time.perf_counter()
    trained, result, seconds = training.search(options, folder, times)
    tuned |= {"is_over": True, "before_seconds": seconds, "run_seconds": time.perf_counter() - began}
    if result is not None:
        tuned["result"] = _noted(result, seconds, training.SIZE, is_kept=True)
    return trained


def _fit(training: Any, options: Any, folder: Path, times: int, tuned: dict[str, Any]) -> Any:
    from lightning.pytorch import Callback, LightningModule, Trainer

    from lightning_offload import EfficientBatchSizeFinder

    class Watch(Callback):
        @override
        def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
            self.began = time.perf_counter()

        @override
        def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
            if "before_seconds" not in tuned:
                tuned["before_seconds"] = time.perf_counter() - self.began
                tuned["num_batches"] = trainer.num_training_batches

        @override
        def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
            tuned.update(is_over=True, run_seconds=time.perf_counter() - self.began)

    finders = [] if options is None else [EfficientBatchSizeFinder(**options)]
    trained = training.train(None, folder, [*finders, Watch()], times)
    for result in (finder.result for finder in finders if finder.result is not None):
        is_kept = result.lr_factor == 1.0 and result.accumulation == result.configured_accumulation
        tuned["result"] = _noted(result, result.tuning_seconds, result.configured_batch_size, is_kept=is_kept)
    return trained


def _noted(result: Any, seconds: float, configured: int, *, is_kept: bool) -> dict[str, Any]:
    return {
        "batch_size": result.batch_size,
        "configured": configured,
        "is_kept": is_kept and result.batch_size == configured,
        "seconds": seconds,
        "trials": [(trial.batch_size, trial.samples_per_second) for trial in result.trials if trial.is_ok],
        "note": getattr(result, "note", ""),
    }
