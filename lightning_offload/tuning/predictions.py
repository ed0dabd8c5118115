"""Predictions of batch sizes that were not run.

From the steps recorded at a few sizes comes a performance model
(:class:`~lightning_offload.planning.step_model.StepModel`), which gives the step at any other. The planner plans that,
and its step time gives samples per second, ``num_ranks * n / (step + fixed)``, scaled to the throughput of the trials
that were recorded. Rank zero alone predicts, and tells the others: their own times would differ a little.

Effort: a little planning is enough while it comes close to the lower bound of the step time; where it does not, which
is close to the smallest feasible budget, the planner takes the effort that the real plan will get.

Shortfall: the times of ops are extrapolated, and gradients' all-reduce and the input pipeline only count as the
``fixed_seconds`` that the caller knows of.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, final

from lightning_offload.errors import BudgetInfeasibleError, OffloadError, TuningError
from lightning_offload.graph.device_spec import DeviceSpec
from lightning_offload.graph.memory_plan import MemoryPlan
from lightning_offload.planning.planner import check_policy, plan
from lightning_offload.planning.problem import Problem
from lightning_offload.planning.request import PlanRequest
from lightning_offload.planning.step_model import StepModel, check_size
from lightning_offload.tuning.trial import Prediction, Trial

if TYPE_CHECKING:
    from lightning_offload.plugins.memory import MemoryPlugin
    from lightning_offload.plugins.report import Planned

__all__ = ["Predictor", "Recorded"]

_CLOSE = 1.05  # times the lower bound of the step time: more effort could not change a choice between sizes
_PLAIN = "keep-all"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """What a memory plugin showed of a few steps at one batch size.

    Attributes:
        planned: The step, and the device it was planned for.
        fixed_seconds: What the step took beyond forward and backward: the optimizer and the transfer of the batch.
        policy: Who plans.
        budget_bytes: The budget, None for no limit.
    """

    planned: Planned
    fixed_seconds: float
    policy: str
    budget_bytes: int | None

    @classmethod
    def of(cls, memory: MemoryPlugin, step_seconds: float) -> Recorded | None:
        """Read a plugin; None where it recorded nothing.

        Args:
            memory: It measured the last step.
            step_seconds: What that took.
        """
        memory.plan()
        report = memory.report(of_last=True)
        if report.planned is None:
            return None
        return cls(
            planned=report.planned,
            fixed_seconds=max(0.0, step_seconds - (report.measured_step_seconds or step_seconds)),
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
        self._throughput_scale = 1.0
        self._made: dict[int, Prediction | None] = {}
        self._needs: dict[int, int] = {}

    @classmethod
    def fit(cls, recorded: Mapping[int, Recorded], trials: Sequence[Trial], num_ranks: int) -> Predictor | None:
        """Make one from steps recorded at some sizes, with the throughput of their trials; None where it cannot be.

        Args:
            recorded: By size.
            trials: Of these sizes, and any others.
            num_ranks: Devices that train together.
        """
        if len(recorded) < 2:
            return None
        largest = recorded[max(recorded)]
        try:
            step_model = StepModel.fit({size: found.planned.graph for size, found in recorded.items()})
            predictor = cls(
                step_model, largest.planned.device, largest.budget_bytes, largest.policy, num_ranks,
                min(found.fixed_seconds for found in recorded.values()),
            )  # fmt: skip
        except OffloadError:
            return None
        predictor._scale(
            [
                trial.samples_per_second / prediction.samples_per_second
                for trial in trials
                if trial.batch_size in recorded
                and trial.samples_per_second
                and (prediction := predictor(trial.batch_size)) is not None
                and prediction.samples_per_second
            ]
        )
        return predictor

    def __call__(self, batch_size: int) -> Prediction | None:
        """Predict a batch size; None where the model does not reach it.

        Raises:
            TuningError: The size is not a positive integer.
        """
        check_size(batch_size)
        if batch_size not in self._made:
            try:
                self._made[batch_size] = self._predict(batch_size)
            except OffloadError:
                self._made[batch_size] = None
        return self._made[batch_size]

    @property
    def made(self) -> tuple[Prediction, ...]:
        """All predictions so far, by size."""
        return tuple(made for _, made in sorted(self._made.items()) if made is not None)

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
            samples_per_second=self._throughput_scale * self._num_ranks * batch_size / seconds if seconds > 0 else None,
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

    def _scale(self, ratios: Sequence[float]) -> None:
        """Multiply what was and will be predicted by how much faster trials were; the median counts."""
        if not ratios:
            return
        self._throughput_scale = median(ratios)
        for size, made in self._made.items():
            if made is not None and made.samples_per_second is not None:
                scaled = made.samples_per_second * self._throughput_scale
                self._made[size] = dataclasses.replace(made, samples_per_second=scaled)
