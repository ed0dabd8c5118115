"""Machines with known throughput: a fake clock, known curves, known noise; and which batch sizes are right on them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from lightning_offload.tuning.trial import Prediction, Trial

Curve = Callable[[int], float]
"""Samples per second of a batch size."""

REPEATS = 5


@dataclass(kw_only=True)
class FakeMachine:
    """Runs trials of a known curve on a fake clock.

    `noise` is the deviation of each repeat's logarithm, `drift` that of each trial's, which all its repeats share;
    `spikes` is the share of repeats that something slows down by 1.2 to 2.5.
    """

    curve: Curve
    edge: int
    noise: float = 0.05
    drift: float = 0.0
    spikes: float = 0.0
    repeats: int = REPEATS
    seed: int = 0
    now: float = 0.0
    sizes: list[int] = field(default_factory=list)
    rng: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)

    def run(self, batch_size: int) -> Trial:
        self.sizes.append(batch_size)
        if batch_size > self.edge:
            self.now += 0.1
            return Trial(batch_size=batch_size, is_ok=False, reason=f"out of memory at {batch_size}")
        seconds = batch_size / self.curve(batch_size)
        if self.drift:
            seconds *= math.exp(self.rng.normal(0, self.drift))
        steps = tuple(float(seconds * math.exp(e)) for e in self.rng.normal(0, self.noise, self.repeats))
        if self.spikes:
            slowed = np.where(
                self.rng.random(self.repeats) < self.spikes, self.rng.uniform(1.2, 2.5, self.repeats), 1.0
            )
            steps = tuple(float(step * by) for step, by in zip(steps, slowed, strict=True))
        self.now += sum(steps)
        return Trial.from_steps(batch_size, steps, peak_bytes=1000 + 10 * batch_size)

    def clock(self) -> float:
        return self.now


@dataclass(frozen=True, kw_only=True)
class Case:
    """A drawn machine: its curve, its edge, the largest size allowed, and a prediction that is wrong in a known way."""

    curve: Curve
    edge: int
    max_size: int
    predict: Callable[[int], Prediction]


def right_sizes(curve: Curve, largest: int, *, smallest: int = 1, tolerance: float = 0.03) -> set[int]:
    """All right sizes: fast enough, and nothing much smaller does as well."""
    true = {n: curve(n) for n in range(smallest, largest + 1)}
    best = max(true.values())
    as_good = next(n for n, speed in true.items() if speed >= (1 - tolerance / 2) * best)
    return {n for n, speed in true.items() if speed >= (1 - tolerance - 0.02) * best and as_good >= 0.75 * n}


def saturating(k: float, top: float = 1000.0) -> Curve:
    """Fixed seconds per step and seconds per sample: b / (b + k)."""
    return lambda n: top * n / (n + k)


def kinked(k: float, top: float = 1000.0) -> Curve:
    """The device is idle below k samples and full above: a sharp knee."""
    return lambda n: top * n / (max(n, k) + 0.02 * k)


def peaked(k: float, peak: float, fall: float, top: float = 1000.0) -> Curve:
    """Above `peak` the swapping no longer hides: each sample more costs `fall` times what it did."""
    return lambda n: top * n / (n + k + fall * max(0.0, n - peak))


def stepped(k: float, tile: int, top: float = 1000.0) -> Curve:
    """Work is done in whole tiles: a sawtooth under b / (b + k)."""
    return lambda n: top * n / (math.ceil(n / tile) * tile + k)


def two_humps(k: float, first: float, dip: float, top: float = 1000.0) -> Curve:
    """Between `first` and twice that a slow kernel is picked: throughput dips and comes back."""
    return lambda n: top * n / (n + k) * ((1 - dip) if first < n <= 2 * first else 1.0)


def creeping(k: float, power: float, top: float = 1000.0) -> Curve:
    """Caches and kernels go on improving a little: each doubling gains a few percent beyond b / (b + k)."""
    return lambda n: top * n / (n + k) * n**power


SHAPES = ("saturating", "kinked", "peaked", "stepped", "two_humps")


def draw_case(shape: str, seed: int, *, is_blind: bool = False, is_exact: bool = False) -> Case:
    """Draw a machine of a shape, its size and edge over wide ranges, and a prediction of it.

    The prediction is off by a factor that changes with size, tens of percent in all, and so is its edge. A blind one
    sees moreover neither tiles nor peaks nor dips, and the fixed cost of a step only to within 60%. An exact one is
    off by nothing.
    """
    rng = np.random.default_rng([seed, *shape.encode()])
    k = float(np.exp(rng.uniform(np.log(1), np.log(400))))
    max_size = 4096
    edge = int(np.exp(rng.uniform(np.log(48), np.log(6000))))
    plain = saturating(k)
    if shape == "saturating":
        curve = plain
    elif shape == "kinked":
        curve = kinked(k)
    elif shape == "peaked":
        curve = peaked(k, float(np.exp(rng.uniform(np.log(16), np.log(1500)))), float(rng.uniform(0.2, 3.0)))
    elif shape == "stepped":
        curve = stepped(k, int(rng.choice([8, 16, 32])))
    elif shape.startswith("tiles"):
        curve = stepped(k, int(shape.removeprefix("tiles")))
    elif shape == "creeping":
        curve = creeping(k, float(rng.uniform(0.01, 0.08)))
    else:
        curve = two_humps(k, float(np.exp(rng.uniform(np.log(16), np.log(1000)))), float(rng.uniform(0.05, 0.4)))
    scale, tilt, bend = rng.uniform(0.7, 1.4), rng.uniform(-0.06, 0.06), rng.uniform(-0.1, 0.1)
    predicted_edge = int(edge * rng.uniform(0.75, 1.3))
    if is_exact:
        scale, tilt, bend, predicted_edge = 1.0, 0.0, 0.0, edge
    model = saturating(k * float(rng.uniform(0.6, 1.6))) if is_blind else curve

    def predict(n: int) -> Prediction:
        if n > predicted_edge:
            return Prediction(batch_size=n, is_feasible=False)
        octaves = math.log2(n / 64)
        bias = scale * math.exp(tilt * octaves + bend * math.sin(octaves / 2))
        return Prediction(batch_size=n, is_feasible=True, samples_per_second=model(n) * bias, peak_bytes=1000 + 10 * n)

    return Case(curve=curve, edge=edge, max_size=max_size, predict=predict)
