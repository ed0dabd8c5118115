"""Training steps of known duration: modules that really sleep, on a real clock, and an edge where memory ends.

A search of its own finds a batch size for each of some drawn machines, without any prediction, and its choice is judged
on the curve that the machine was drawn with. What a step costs beside its sleep is measured first and is part of that
curve. Noise multiplies each sleep; what the machine's scheduler adds comes on top and is in no curve.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.tuner.judging import judge
from lightning_offload.tuning.acquisition import Space
from lightning_offload.tuning.search import find_batch_size
from lightning_offload.tuning.trial import Trial

__all__ = ["NOISE", "SHAPES", "Machine", "Outcome", "Sleeper", "draw", "measure_overhead", "search"]

SHAPES = ("saturating", "peaked", "stepped", "noisy")
"""Shapes of throughput over batch size; the noisy one saturates, and its steps scatter."""

NOISE = 0.05
"""Deviation of the logarithm of a noisy step's duration."""

_SAMPLES_PER_SECOND = 40_000.0  # long steps make the search slow, short ones drown in what Python costs
_LARGEST = 1024
_NUM_WARMUP, _NUM_TIMED = 2, 5
_NUM_CALIBRATIONS, _CALIBRATION_SECONDS = 25, 2e-3

Seconds = Callable[[int], float]
"""Duration of a step by batch size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A drawn machine.

    Attributes:
        shape: Name of its curve's shape.
        seconds: Duration of a step.
        edge: The largest size that fits.
        noise: Deviation of the logarithm of a step's duration.
    """

    shape: str
    seconds: Seconds
    edge: int
    noise: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one search did; `chosen` is None where it failed, for the reason in `error`."""

    shape: str
    seed: int
    edge: int
    chosen: int | None
    best_size: int | None
    best_over_chosen: float | None
    is_right: bool
    num_trials: int
    seconds: float
    error: str = ""


class Sleeper(nn.Module):
    """Its forward takes a known time, and memory ends above an edge."""

    def __init__(self, machine: Machine, seed: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self._machine = machine
        self._rng = np.random.default_rng(seed)

    def forward(self, samples: Tensor) -> Tensor:
        """Sleep for as long as a step of this many samples takes."""
        size = len(samples)
        if size > self._machine.edge:
            raise torch.OutOfMemoryError(f"no memory for {size} samples: the edge is {self._machine.edge}")
        time.sleep(self._machine.seconds(size) * math.exp(self._rng.normal(0, self._machine.noise)))
        return (samples * self.scale).sum()


def draw(shape: str, seed: int) -> Machine:
    """Draw a machine of a shape: where it saturates and where its memory ends vary over wide ranges."""
    rng = np.random.default_rng([seed, *shape.encode()])
    fixed = float(np.exp(rng.uniform(math.log(8), math.log(128))))  # samples whose time each step costs besides
    edge = int(np.exp(rng.uniform(math.log(64), math.log(768))))
    if shape == "peaked":
        peak, fall = float(np.exp(rng.uniform(math.log(16), math.log(384)))), float(rng.uniform(0.2, 2.0))
        seconds = functools.partial(_peaked, fixed=fixed, peak=peak, fall=fall)
    elif shape == "stepped":
        seconds = functools.partial(_stepped, fixed=fixed, tile=int(rng.choice([8, 16, 32])))
    else:
        seconds = functools.partial(_saturating, fixed=fixed)
    return Machine(shape=shape, seconds=seconds, edge=edge, noise=NOISE if shape == "noisy" else 0.0)


def _saturating(size: int, *, fixed: float) -> float:
    return (size + fixed) / _SAMPLES_PER_SECOND


def _peaked(size: int, *, fixed: float, peak: float, fall: float) -> float:
    """Beyond the peak each further sample costs more, as where swapping no longer hides."""
    return (size + fixed + fall * max(0.0, size - peak)) / _SAMPLES_PER_SECOND


def _stepped(size: int, *, fixed: float, tile: int) -> float:
    """Work is done in whole tiles."""
    return (math.ceil(size / tile) * tile + fixed) / _SAMPLES_PER_SECOND


def measure_overhead() -> float:
    """Measure what a step costs beside its sleep: the median, in seconds."""
    machine = Machine(shape="", seconds=lambda size: _CALIBRATION_SECONDS, edge=1, noise=0.0)
    step = functools.partial(_step, Sleeper(machine, 0), 1)
    step()
    return statistics.median(step() - _CALIBRATION_SECONDS for _ in range(_NUM_CALIBRATIONS))


def search(shape: str, seed: int, *, tolerance: float, overhead_seconds: float) -> Outcome:
    """Find a batch size on a drawn machine and judge it.

    Args:
        shape: One of :data:`SHAPES`.
        seed: Of the machine and of its noise.
        tolerance: That of the search.
        overhead_seconds: What a step costs beside its sleep.
    """
    machine = draw(shape, seed)
    model = Sleeper(machine, seed)
    trials: list[Trial] = []

    def run(size: int) -> Trial:
        trials.append(_trial(model, size))
        return trials[-1]

    start = time.perf_counter()
    known: dict[str, Any] = {"shape": shape, "seed": seed, "edge": machine.edge}
    try:
        found = find_batch_size(run, Space(high=_LARGEST, tolerance=tolerance))
    except Exception as error:  # one search that fails is a result, not the end of the others
        return Outcome(
            **known, chosen=None, best_size=None, best_over_chosen=None, is_right=False, num_trials=len(trials),
            seconds=time.perf_counter() - start, error=f"{type(error).__name__}: {error}",
        )  # fmt: skip
    seconds = time.perf_counter() - start
    speeds = {n: n / (machine.seconds(n) + overhead_seconds) for n in range(1, min(machine.edge, _LARGEST) + 1)}
    verdict = judge(found.batch_size, speeds, tolerance)
    return Outcome(
        **known, chosen=found.batch_size, best_size=verdict.best_size, best_over_chosen=verdict.best_over_chosen,
        is_right=verdict.is_right, num_trials=len(trials), seconds=seconds,
    )  # fmt: skip


def _trial(model: Sleeper, size: int) -> Trial:
    try:
        times = [_step(model, size) for _ in range(_NUM_WARMUP + _NUM_TIMED)]
    except torch.OutOfMemoryError as error:
        return Trial(batch_size=size, is_ok=False, reason=str(error))
    return Trial.from_steps(size, tuple(times[_NUM_WARMUP:]))


def _step(model: Sleeper, size: int) -> float:
    samples = torch.ones(size)
    start = time.perf_counter()
    model(samples).backward()
    return time.perf_counter() - start
