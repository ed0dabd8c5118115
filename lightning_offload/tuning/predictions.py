"""Predictions of batch sizes that were not run, the same on every rank.

From the steps recorded at a few sizes comes a performance model, and from that the throughput, the peak and the
smallest budget of any size; its throughput is scaled to that of the steps as they run unwatched. Rank zero predicts and
tells the others, whose own times would differ a little and lead them astray.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

from lightning_offload.errors import OffloadError
from lightning_offload.planning.step_model import StepModel
from lightning_offload.plugins.report import Planned
from lightning_offload.tuning.predictor import Predictor
from lightning_offload.tuning.ranks import Coordinator
from lightning_offload.tuning.trial import Prediction

__all__ = ["Predictions", "Recorded", "fit_predictor", "throughput_scale_of"]

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """What a few steps at one batch size showed.

    Attributes:
        planned: The step, and the device it was planned for; None where nothing could record it.
        peak_bytes: Peak of the last measured step.
        fixed_seconds: What the step took beyond forward and backward: the optimizer and the transfer of the batch.
        step_seconds: The median of a few steps that nothing watched; 0.0 where there is no recording.
    """

    planned: Planned | None
    peak_bytes: int | None
    fixed_seconds: float = 0.0
    step_seconds: float = 0.0

    @property
    def has_collectives(self) -> bool:
        """Whether ranks talk to one another within forward and backward."""
        return self.planned is not None and self.planned.graph.has_collectives


class Predictions:
    """Rank zero's predictions: `local` there, which no other rank need call, and a call by all ranks on all.

    Args:
        predictor: This rank's; that of rank zero counts.
        agreement: Between ranks.
        throughput_scale: What its throughput is multiplied by.
    """

    def __init__(self, predictor: Predictor | None, agreement: Coordinator, throughput_scale: float = 1.0) -> None:
        self._predictor, self._agreement, self._throughput_scale = predictor, agreement, throughput_scale
        self.is_usable: bool = agreement.broadcast(predictor is not None)
        self._made: dict[int, Prediction | None] = {}

    def __call__(self, batch_size: int) -> Prediction | None:
        """Predict a size, on all ranks; None without a predictor."""
        return self._agreement.broadcast(self.local(batch_size)) if self.is_usable else None

    def local(self, batch_size: int) -> Prediction | None:
        """Predict a size on this rank alone."""
        if batch_size not in self._made:
            self._made[batch_size] = _scaled(_try(self._predictor, batch_size), self._throughput_scale)
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
        return self._told(lambda p: p.plain().largest_feasible(min_size, max_size))

    def _told(self, find: Callable[[Predictor], _T | None]) -> _T | None:
        """What rank zero finds with its predictor; None without one, and where it cannot tell."""
        if not self.is_usable:
            return None
        try:
            found = find(self._predictor) if self._predictor is not None else None
        except OffloadError:
            found = None
        return self._agreement.broadcast(found)


def _try(predictor: Predictor | None, batch_size: int) -> Prediction | None:
    try:
        return predictor(batch_size) if predictor is not None else None
    except OffloadError:
        return None  # a size beyond the model is a size without a prediction


def _scaled(prediction: Prediction | None, throughput_scale: float) -> Prediction | None:
    if prediction is None or prediction.samples_per_second is None:
        return prediction
    return dataclasses.replace(prediction, samples_per_second=throughput_scale * prediction.samples_per_second)


def throughput_scale_of(predictor: Predictor | None, recorded: Mapping[int, Recorded], num_ranks: int) -> float:
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
