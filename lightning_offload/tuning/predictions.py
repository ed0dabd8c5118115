"""Predictions of batch sizes that were not run, the same on every rank.

From the steps recorded at a few sizes comes a performance model, and from that the throughput, the peak and the
smallest budget of any size; its throughput is scaled to that of the steps as they run unwatched. Rank zero predicts and
tells the others, whose own times would differ a little and lead them astray. Where no step could be recorded but peaks
were measured, :class:`LinePredictor` draws a line through those.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Protocol, TypeVar

from lightning_offload.errors import OffloadError
from lightning_offload.planning.step_model import StepModel
from lightning_offload.plugins.report import Planned
from lightning_offload.tuning.predictor import Predictor
from lightning_offload.tuning.ranks import Coordinator
from lightning_offload.tuning.scaling import Scaling, simulate_scaling
from lightning_offload.tuning.trial import Prediction, Trial

__all__ = ["LinePredictor", "Predictions", "Recorded", "fit_predictor", "pace_of"]

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """What a few steps at one batch size showed.

    Attributes:
        planned: The step, and the device it was planned for; None where nothing could record it.
        peak_bytes: Peak of the last measured step.
        fixed_seconds: What the step took beyond forward and backward: the optimizer and the transfer of the batch.
        step_seconds: The shortest of a few steps that nothing watched; 0.0 where there is no recording.
    """

    planned: Planned | None
    peak_bytes: int | None
    fixed_seconds: float = 0.0
    step_seconds: float = 0.0

    @property
    def has_collectives(self) -> bool:
        """Whether ranks talk to one another within forward and backward."""
        return self.planned is not None and self.planned.graph.has_collectives


class Predicting(Protocol):
    """Predicts a size, and tells the largest one that fits."""

    def __call__(self, batch_size: int) -> Prediction: ...

    def largest_feasible(self, min_size: int, max_size: int) -> int | None: ...


class Predictions:
    """Rank zero's predictions: `local` there, which no other rank need call, and a call by all ranks on all.

    Args:
        predictor: This rank's; that of rank zero counts.
        agreement: Between ranks.
        pace: What its throughput is multiplied by.
    """

    def __init__(self, predictor: Predicting | None, agreement: Coordinator, pace: float = 1.0) -> None:
        self._predictor, self._agreement, self._pace = predictor, agreement, pace
        self.is_usable: bool = agreement.broadcast(predictor is not None)
        self._made: dict[int, Prediction | None] = {}

    def __call__(self, batch_size: int) -> Prediction | None:
        """Predict a size, on all ranks; None without a predictor."""
        return self._agreement.broadcast(self.local(batch_size)) if self.is_usable else None

    def local(self, batch_size: int) -> Prediction | None:
        """Predict a size on this rank alone."""
        if batch_size not in self._made:
            self._made[batch_size] = _at_pace(_try(self._predictor, batch_size), self._pace)
        return self._made[batch_size]

    def made(self) -> tuple[Prediction, ...]:
        """All predictions so far, by size; on all ranks."""
        made = tuple(made for _, made in sorted(self._made.items()) if made is not None)
        return self._agreement.broadcast(made)

    def largest(self, min_size: int, max_size: int) -> int | None:
        """The largest size that is predicted to fit."""
        return self._told(lambda p: p.largest_feasible(min_size, max_size))

    def largest_plain(self, min_size: int, max_size: int) -> int | None:
        """The same without a memory plan."""
        return self._told(
            lambda p: p.plain().largest_feasible(min_size, max_size) if isinstance(p, Predictor) else None
        )

    def scaling(self, batch_size: int, samples_per_second: float, *, accumulation: int) -> Scaling | None:
        """What a size would do on 1 to 1024 devices, simulated from its measured throughput."""
        step_seconds = self._agreement.num_ranks * batch_size / samples_per_second

        def simulate(predictor: Predicting) -> Scaling | None:
            if not isinstance(predictor, Predictor):
                return None
            return simulate_scaling(predictor, batch_size, step_seconds=step_seconds, accumulation=accumulation)

        return self._told(simulate)

    def _told(self, find: Callable[[Predicting], _T | None]) -> _T | None:
        """What rank zero finds with its predictor; None without one, and where it cannot tell."""
        if not self.is_usable:
            return None
        try:
            found = find(self._predictor) if self._predictor is not None else None
        except OffloadError:
            found = None
        return self._agreement.broadcast(found)


def _try(predictor: Predicting | None, batch_size: int) -> Prediction | None:
    try:
        return predictor(batch_size) if predictor is not None else None
    except OffloadError:
        return None  # a size beyond the model is a size without a prediction


def _at_pace(prediction: Prediction | None, pace: float) -> Prediction | None:
    if prediction is None or prediction.samples_per_second is None:
        return prediction
    return dataclasses.replace(prediction, samples_per_second=pace * prediction.samples_per_second)


def pace_of(predictor: Predicting | None, recorded: Mapping[int, Recorded], num_ranks: int) -> float:
    """How much faster than predicted the recorded steps ran once nothing watched them; the median over sizes."""
    ratios = []
    for size, found in recorded.items():
        prediction = _try(predictor, size)
        if prediction is not None and prediction.samples_per_second and found.step_seconds > 0:
            ratios.append(num_ranks * size / found.step_seconds / prediction.samples_per_second)
    return median(ratios) if ratios else 1.0


def fit_predictor(
    recorded: Mapping[int, Recorded], *, budget_bytes: int | None, policy: str, num_ranks: int
) -> Predictor | None:
    """Make the predictor for steps recorded at some sizes; None where they do not suffice."""
    planned = {size: found.planned for size, found in recorded.items() if found.planned is not None}
    if len(planned) < 2:
        return None
    try:
        step_model = StepModel.fit({size: found.graph for size, found in planned.items()})
        fixed_seconds = min(recorded[size].fixed_seconds for size in planned)
        device = planned[max(planned)].device
        return Predictor(step_model, device, budget_bytes, policy, num_ranks, fixed_seconds)
    except OffloadError:
        return None


class LinePredictor:
    """Seconds and peak as a line through what was measured at two or more sizes.

    Args:
        trials: Trials that were ok.
        budget_bytes: The budget.
        num_ranks: Devices that train together.

    Shortfalls: libraries switch kernels with size, which a line does not know; nothing is known of memory plans.
    """

    def __init__(self, trials: Sequence[Trial], budget_bytes: int | None, num_ranks: int) -> None:
        ok = [t for t in trials if t.is_ok and t.samples_per_second]
        self._seconds = _line([(t.batch_size, t.batch_size * num_ranks / (t.samples_per_second or 1.0)) for t in ok])
        self._peak = _line([(t.batch_size, float(t.peak_bytes)) for t in ok if t.peak_bytes is not None])
        self._budget_bytes, self._num_ranks = budget_bytes, num_ranks

    def __call__(self, batch_size: int) -> Prediction:
        """Predict a size."""
        seconds, peak = _at(self._seconds, batch_size), _at(self._peak, batch_size)
        return Prediction(
            batch_size=batch_size,
            is_feasible=self._budget_bytes is None or peak is None or peak <= self._budget_bytes,
            samples_per_second=self._num_ranks * batch_size / seconds if seconds else None,
            peak_bytes=None if peak is None else int(peak),
            floor_bytes=None if peak is None else int(peak),
        )

    def largest_feasible(self, min_size: int, max_size: int) -> int | None:
        """The largest size whose peak stays within the budget."""
        if not self(min_size).is_feasible:
            return None
        low, high = min_size, max_size + 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self(middle).is_feasible else (low, middle)
        return low


def _line(points: list[tuple[int, float]]) -> tuple[float, float] | None:
    """Least-squares offset and slope; None for fewer than two sizes."""
    if len({x for x, _ in points}) < 2:
        return None
    mean_x, mean_y = sum(x for x, _ in points) / len(points), sum(y for _, y in points) / len(points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)
    return mean_y - slope * mean_x, slope


def _at(line: tuple[float, float] | None, x: int) -> float | None:
    return None if line is None else max(0.0, line[0] + line[1] * x)
