"""What the search for a batch size sees: a trial that was run, and a prediction that was not.

A *trial* is a few timed training steps at one batch size. Under data parallelism every rank runs the trial,
and what the search is given is the same :class:`Trial` on every rank (see :mod:`lightning_offload.tuning.ranks`).
Measured and predicted figures stand beside each other in one record, so that a report can show both.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from lightning_offload.errors import TuningError

__all__ = ["Predict", "Prediction", "Run", "Trial"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A batch size that was tried.

    Args:
        batch_size: Samples of one step on one rank.
        is_ok: No rank ran out of memory, and the peak stayed within the budget on all of them.
        samples_per_second: Of all ranks together, by the slowest rank's median step; None where it failed.
        peak_bytes: The largest over the ranks; None where it is not known.
        step_seconds: The repeats that were measured, in seconds, warm-up left out.
        predicted_samples_per_second: What a performance model said before the trial.
        predicted_peak_bytes: What a performance model said before the trial.
        reason: Why it is not ok; empty where it is.
    """

    batch_size: int
    is_ok: bool
    samples_per_second: float | None = None
    peak_bytes: int | None = None
    step_seconds: tuple[float, ...] = ()
    predicted_samples_per_second: float | None = None
    predicted_peak_bytes: int | None = None
    reason: str = ""

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise TuningError(f"a trial of batch size {self.batch_size} is not possible: it must be 1 or more")
        speed = self.samples_per_second
        if self.is_ok and (speed is None or not math.isfinite(speed) or speed <= 0):
            raise TuningError(
                f"the trial of batch size {self.batch_size} is ok but gives {speed} samples per second: "
                "give a positive number, or is_ok=False and the reason"
            )

    @classmethod
    def from_steps(cls, batch_size: int, step_seconds: tuple[float, ...], *, peak_bytes: int | None = None) -> Trial:
        """Make the trial of one process that went well.

        Args:
            batch_size: Samples of one step.
            step_seconds: The timed repeats, in seconds, at least one.
            peak_bytes: The largest peak of these steps.

        Returns:
            A trial whose throughput is that of the median step.

        Raises:
            TuningError: There is no repeat, or the median step took no time.
        """
        middle = median(step_seconds) if step_seconds else 0.0
        if middle <= 0:
            raise TuningError(
                f"the trial of batch size {batch_size} has the step times {step_seconds}: "
                "at least one repeat of more than zero seconds is needed"
            )
        return cls(
            batch_size=batch_size,
            is_ok=True,
            samples_per_second=batch_size / middle,
            peak_bytes=peak_bytes,
            step_seconds=step_seconds,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What a performance model says of a batch size, without running it.

    Args:
        batch_size: Samples of one step on one rank.
        is_feasible: Whether some plan keeps the step within the budget.
        samples_per_second: Of all ranks together; None where the model cannot tell.
        peak_bytes: Predicted peak of a step.
        floor_bytes: The smallest budget at which this size still works.
    """

    batch_size: int
    is_feasible: bool
    samples_per_second: float | None = None
    peak_bytes: int | None = None
    floor_bytes: int | None = None


Run = Callable[[int], Trial]
"""Runs a few steps at a batch size. Called with each size, sometimes twice; agrees across ranks before it returns."""

Predict = Callable[[int], Prediction | None]
"""Predicts a batch size, or None where it cannot."""
