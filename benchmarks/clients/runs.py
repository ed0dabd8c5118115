"""All runs of one training, each in a fork of a process that has imported its packages, with the same seed.

Plain; within shares of plain's own peak, the smallest first, until one is feasible; and within an ample budget. Each
once with live bytes counted from outside, and once timed; plain is timed before and after the others.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import pickle
import random
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.clients.watching import Seen, note_end, watching
from lightning_offload.errors import BudgetInfeasibleError

SHARES = (0.75, 0.85, 0.95)
"""Of plain's peak: budgets, the first of which that is feasible is measured."""

AMPLE = "64GiB"
_SEED = 7
_Train = Callable[[str | None, Path], nn.Module]


@dataclasses.dataclass(slots=True, kw_only=True)
class Run:
    """One training.

    Attributes:
        state: "done", "refused" for an infeasible budget, or "error".
        message: The error's first line.
        seen: What it was seen to do, up to its end.
        tuned: What a finder of the batch size did, where there is one.
    """

    state: str
    message: str = ""
    seen: Seen = dataclasses.field(default_factory=Seen)
    tuned: dict[str, Any] = dataclasses.field(default_factory=dict)


def measure(device: torch.device, *, quick: bool, name: str, packages: Sequence[str]) -> dict[str, Any]:
    """Make all runs of the training of a module, for `benchmarks.gpu.child`.

    Returns:
        Ready for JSON: `missing`, what could not be imported; or `versions` of the packages, `runs` by label, the
        budget as its `share` of plain's peak and in `budget_bytes`, and what was told of those that were `refused`, by
        share.
    """
    try:
        training = importlib.import_module(f"benchmarks.clients.trainings.{name}")
    except ImportError as error:
        return {"missing": first_line(error)}
    train: _Train = training.train
    counted = _fork(train, None, counts=True)
    runs = {"plain, counted": counted}
    found: dict[str, Any] = {"versions": {package: metadata.version(package) for package in packages}, "refused": {}}
    if counted.state == "done":
        plain_bytes = max(counted.seen.peak_bytes)
        budget = None
        for share in SHARES:
            budget_bytes = int(share * plain_bytes)
            run = _fork(train, f"{budget_bytes}B", counts=True)
            if run.state != "refused":
                runs["tight, counted"] = run
                found |= {"share": share, "budget_bytes": budget_bytes}
                budget = f"{budget_bytes}B"
                break
            found["refused"][str(share)] = run.message
        runs["ample, counted"] = _fork(train, AMPLE, counts=True)
        runs["plain, timed"] = _fork(train, None, counts=False)
        if budget is not None:
            runs["tight, timed"] = _fork(train, budget, counts=False)
        runs["ample, timed"] = _fork(train, AMPLE, counts=False)
        runs["plain, timed again"] = _fork(train, None, counts=False)
    return {**found, "runs": {label: dataclasses.asdict(run) for label, run in runs.items()}}


def _fork(train: _Train, budget: str | None, *, counts: bool) -> Run:
    return fork(lambda folder: _run(train, budget, folder, counts=counts))


def fork(train: Callable[[Path], Run]) -> Run:
    """Train in a fork of this process.

    Args:
        train: Given a folder for what it writes.
    """
    with tempfile.TemporaryDirectory(prefix="benchmark-client-") as name:
        folder = Path(name)
        output = folder / "run.pickle"
        sys.stdout.flush()
        sys.stderr.flush()
        child = os.fork()
        if child == 0:
            try:
                output.write_bytes(pickle.dumps(train(folder)))
            finally:
                os._exit(0)  # nothing of the parent's is to be ended twice
        _, status = os.waitpid(child, 0)
        if not output.exists():
            return Run(state="error", message=f"the process ended with status {os.waitstatus_to_exitcode(status)}")
        run: Run = pickle.loads(output.read_bytes())
        return run


def _run(train: _Train, budget: str | None, folder: Path, *, counts: bool) -> Run:
    seed()
    with watching(counts=counts) as seen:
        try:
            trained = train(budget, folder)
        except BudgetInfeasibleError as error:
            return Run(state="refused", message=first_line(error), seen=seen)
        except Exception as error:
            traceback.print_exc()
            return Run(state="error", message=first_line(error), seen=seen)
        note_end(seen, trained)
    return Run(state="done", seen=seen)


def seed() -> None:
    """Begin from the same random state."""
    random.seed(_SEED)
    np.random.seed(_SEED)  # noqa: NPY002  # the state that libraries use
    torch.manual_seed(_SEED)


def first_line(error: BaseException) -> str:
    """An error's kind and its first line."""
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
