"""Predictions of batch sizes that were not run, the same on every rank.

From the steps recorded at a few sizes comes a performance model
(:class:`~lightning_offload.planning.step_model.StepModel`), which gives the step at any other. The planner plans that,
and its step time gives samples per second, ``num_ranks * n / (step + fixed)``, scaled to the throughput of the steps as
they run unwatched. Rank zero predicts and tells the others, whose own times would differ a little and lead them astray.

Effort: a little planning is enough while it comes close to the lower bound of the step time; where it does not, which
is close to the smallest feasible budget, the planner takes the effort that the real plan will get.

Shortfall: the times of ops are extrapolated, and gradients' all-reduce and the input pipeline only count as the
``fixed_seconds`` that the caller knows of.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, TypeVar, final

from lightning_offload.errors import BudgetInfeasibleError, OffloadError, TuningError
from lightning_offload.graph.device_spec import DeviceSpec
from lightning_offload.graph.memory_plan import MemoryPlan
from lightning_offload.planning.planner import check_policy, plan
from lightning_offload.planning.problem import Problem
from lightning_offload.planning.request import PlanRequest
from lightning_offload.planning.step_model import StepModel, check_size
from lightning_offload.tuning.ranks import Coordinator
from lightning_offload.tuning.trial import Prediction

if TYPE_CHECKING:
    from lightning_offload.plugins.memory import MemoryPlugin
    from lightning_offload.plugins.report import Planned

__all__ = ["Predictions", "Predictor", "Recorded", "fit_predictor", "throughput_scale_of"]

_CLOSE = 1.05  # times the lower bound of the step time: more effort could not change a choice between sizes
_PLAIN = "keep-all"

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """What a memory plugin showed of a few steps at one batch size.

    Attributes:
        planned: The step, and the device it was planned for; None where nothing could record it.
        peak_bytes: Peak of the last measured step.
        fixed_seconds: What the step took beyond forward and backward: the optimizer and the transfer of the batch.
        step_seconds: The median of a few steps that nothing watched.
        policy: Who plans.
        budget_bytes: The budget, None for no limit.
    """

    planned: Planned | None
    peak_bytes: int | None
    fixed_seconds: float
    step_seconds: float
    policy: str
    budget_bytes: int | None

    @classmethod
    def of(cls, memory: MemoryPlugin, step_seconds: float) -> Recorded:
        """Read a plugin.

        Args:
            memory: It measured the last step.
            step_seconds: What that took.
        """
        memory.plan()
        report = memory.report(of_last=True)
        return cls(
            planned=report.planned,
            peak_bytes=report.measured_peak_bytes,
            fixed_seconds=max(0.0, step_seconds - (report.measured_step_seconds or step_seconds)),
            step_seconds=step_seconds,
            policy=memory.policy,
            budget_bytes=memory.budget_bytes,
        )


@final
class Predictor:
    """Call it with a batch size for a :class:`~.trial.Prediction`; each size is planned once.

    Args:
        step_model: The step at any size.
        device: Where it runs.
        budget_bytes: Peak of live device bytes allowed, None for no limit.
        policy: Who plans; "keep-all" predicts training without a plan.
        num_ranks: Devices that train together, each on its own batch of that size.
        fixed_seconds: What a step takes beyond forward and backward whatever its size: the optimizer above all.

    Raises:
        PolicyError: No such policy.
    """

    def __init__(
        self,
        step_model: StepModel,
        device: DeviceSpec,
        budget_bytes: int | None,
        policy: str = "auto",
        num_ranks: int = 1,
        fixed_seconds: float = 0.0,
    ) -> None:
        self._step_model, self._device, self._budget_bytes = step_model, device, budget_bytes
        self._policy = check_policy(policy)
        self._num_ranks, self._fixed_seconds = num_ranks, fixed_seconds
        self._predictions: dict[int, Prediction] = {}
        self._needs: dict[int, int] = {}

    def __call__(self, batch_size: int) -> Prediction:
        """Predict a batch size.

        Raises:
            TuningError: The size is not a positive integer.
        """
        if batch_size not in self._predictions:
            self._predictions[batch_size] = self._predict(batch_size)
        return self._predictions[batch_size]

    def plain(self) -> Predictor:
        """The same for training without a plan: everything kept."""
        return Predictor(
            self._step_model, self._device, self._budget_bytes, _PLAIN, self._num_ranks, self._fixed_seconds
        )

    def needed_bytes(self, batch_size: int) -> int:
        """The smallest budget at which a size fits; of a policy other than "auto" and "keep-all", as far as it tells.

        Raises:
            TuningError: The size is not a positive integer.
        """
        if batch_size not in self._needs:
            self._needs[batch_size] = self._needed(batch_size)
        return self._needs[batch_size]

    def fits(self, batch_size: int) -> bool:
        """Whether a size fits the budget, without planning it where the policy allows that."""
        return self._budget_bytes is None or self.needed_bytes(batch_size) <= self._budget_bytes

    def largest_feasible(self, min_size: int, max_size: int) -> int | None:
        """The largest batch size from ``min_size`` to ``max_size`` that fits; None if not even the smallest does.

        By bisection: what a step needs rises with its size.

        Raises:
            TuningError: The sizes are not positive integers in this order.
        """
        if check_size(min_size) > check_size(max_size):
            raise TuningError(f"there is no batch size from {min_size} to {max_size}: min_size must not be larger")
        if not self.fits(min_size):
            return None
        low, high = min_size, max_size + 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.fits(middle) else (low, middle)
        return low

    def _predict(self, batch_size: int) -> Prediction:
        needed_bytes = self.needed_bytes(batch_size)
        infeasible = Prediction(batch_size=batch_size, is_feasible=False, floor_bytes=needed_bytes)
        if not self.fits(batch_size):
            return infeasible
        try:
            made = self._planned(batch_size)
        except BudgetInfeasibleError:
            return infeasible
        seconds = made.predicted_step_seconds + self._fixed_seconds
        return Prediction(
            batch_size=batch_size,
            is_feasible=True,
            samples_per_second=self._num_ranks * batch_size / seconds if seconds > 0 else None,
            peak_bytes=made.predicted_peak_bytes,
            floor_bytes=needed_bytes,
        )

    def _planned(self, batch_size: int) -> MemoryPlan:
        """The plan of a size; a thorough one where a quick one is not close to the bound."""
        graph, device, budget_bytes = self._step_model.at(batch_size), self._device, self._budget_bytes
        quick = plan(graph, device, budget_bytes, policy=self._policy, is_provisional=True)
        if self._policy != "auto" or quick.predicted_step_seconds <= _CLOSE * quick.bound_seconds:
            return quick
        thorough = plan(graph, device, budget_bytes, policy=self._policy)
        return min(quick, thorough, key=lambda made: made.predicted_step_seconds)

    def _needed(self, batch_size: int) -> int:
        if self._policy in ("auto", _PLAIN):
            setting = PlanRequest(Problem(self._step_model.at(batch_size)), self._device, None)
            return (setting.floor if self._policy == "auto" else setting.plain).peak_bytes
        try:
            return self._planned(batch_size).predicted_peak_bytes
        except BudgetInfeasibleError as error:
            return error.floor_bytes


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


def fit_predictor(recorded: Mapping[int, Recorded], num_ranks: int) -> Predictor | None:
    """Make the predictor for steps recorded at some sizes; None where they do not suffice."""
    planned = {size: found.planned for size, found in recorded.items() if found.planned is not None}
    if len(planned) < 2:
        return None
    last = recorded[max(recorded)]
    try:
        step_model = StepModel.fit({size: found.graph for size, found in planned.items()})
        fixed_seconds = min(recorded[size].fixed_seconds for size in planned)
        device = planned[max(planned)].device
        return Predictor(step_model, device, last.budget_bytes, last.policy, num_ranks, fixed_seconds)
    except OffloadError:
        return None
