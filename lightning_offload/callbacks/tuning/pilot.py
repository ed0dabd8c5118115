"""A pilot: real optimizer steps on batches that are all different, which show how noisy gradients are.

Trials cannot: they repeat one batch. At initialisation the noise scale says nothing of the training, and it rises. So
the first half of a pilot's batches is trained on as in the run, as far into it as the pilot may go; the noise scale is
measured in the second half.

A measured step accumulates at least four micro-batches of the configured size, whose gradients are independent; so
batch norm is as it is in the training. With one rank each micro-gradient is what a backward adds to the gradients, with
several it is each rank's first, before they are reduced. Squares are taken after a backward: before gradients are
clipped, and divided by the GradScaler's scale.

Everything is put back afterwards. The rates are those of the run, by its schedules as far as these count steps, so a
measured step that accumulates more micro-batches than the run does is larger in samples, not in parameters. Schedules
are stepped directly: Lightning's hook for that may read what only a run has. One that cannot be stepped here, or that
ends, stays where it is.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_offload.callbacks.tuning.trainer_facts import is_batch_norm_shared, sharding_of
from lightning_offload.tuning.noise_scale import MIN_STEPS, GradientSquares

__all__ = ["Pilot", "PilotPlan", "pilot_plan", "shortest_pilot", "why_no_noise_scale"]

_log = logging.getLogger(__name__)
_NUM_MICRO = 4
"""Batches of a measured step, at least: the error of the estimate falls with their number and that of steps alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PilotPlan:
    """The optimizer steps of a pilot, in this order.

    Attributes:
        num_lead: As the run makes them.
        num_measured: Those that the noise scale is measured in.
        accumulation: Micro-batches of a step as the run makes it.
        num_micro: Micro-batches of a measured step.
    """

    num_lead: int
    num_measured: int
    accumulation: int
    num_micro: int


def shortest_pilot(accumulation: int) -> int:
    """Micro-batches of a pilot that measures just enough steps, where the run accumulates so many."""
    return 2 * MIN_STEPS * _num_micro(accumulation)


def pilot_plan(most_batches: float, *, most_measured: int, accumulation: int) -> PilotPlan | None:
    """Plan a pilot, half of whose batches are measured.

    Args:
        most_batches: Micro-batches that it may take.
        most_measured: The most steps that are measured.
        accumulation: Micro-batches of the run's steps.

    Returns:
        None where that is too few to measure anything.
    """
    if most_batches < shortest_pilot(accumulation):
        return None
    num_micro = _num_micro(accumulation)
    num_measured = int(min(most_measured, most_batches // (2 * num_micro)))
    num_lead = num_measured * num_micro // accumulation
    return PilotPlan(num_lead=num_lead, num_measured=num_measured, accumulation=accumulation, num_micro=num_micro)


def _num_micro(accumulation: int) -> int:
    """A multiple of the run's, so that both halves of a pilot can have as many batches."""
    return accumulation * math.ceil(_NUM_MICRO / accumulation)


def why_no_noise_scale(trainer: Any, module: Any) -> str:
    """Why a pilot cannot measure the noise scale of a run; empty where it can."""
    if not module.automatic_optimization:
        return "with manual optimization its gradients cannot be told apart"
    if len(trainer.optimizers) != 1:
        return f"there are {len(trainer.optimizers)} optimizers"
    if type(trainer.optimizers[0]).__name__ == "LBFGS":
        return "L-BFGS calls for several backwards of a batch"
    if name := sharding_of(trainer):
        return f"{name} shards the gradients"
    if is_batch_norm_shared(trainer, module):
        return "SyncBatchNorm ties the ranks' gradients together"
    return ""


class Pilot:
    """The steps of a pilot, while a fit loop runs them: it tells of its backwards and batches.

    Args:
        trainer: Its optimizers and schedules are made; its accumulation is set for each part of the pilot.
        module: The model.
        plan: The steps.
        micro_size: Samples of a micro-batch, on this rank.
        num_ranks: Ranks that train together.
        num_steps: Optimizer steps of the run, at whose end its schedules end; 0 where they are not to be stepped.
        is_late: Whether no step more is to be made than a measurement needs.

    Attributes:
        measured: Squares of the gradients of the measured steps.
    """

    class Over(BaseException):
        """All steps were made."""

    def __init__(
        self,
        trainer: Any,
        module: Any,
        plan: PilotPlan,
        *,
        micro_size: int,
        num_ranks: int,
        num_steps: float,
        is_late: Callable[[], bool],
    ) -> None:
        self._trainer, self._module, self._is_late = trainer, module, is_late
        self._micro_size, self._num_ranks = micro_size, num_ranks
        self.measured: list[GradientSquares] = []
        configs = [each for each in trainer.strategy.lr_scheduler_configs if each.interval == "step"]
        self._schedules = [each for each in configs if not each.reduce_on_plateau]
        self._plan, self._num_run_steps = plan, num_steps
        self._num_made = self._num_batches = self._num_lead = 0
        self._is_measuring = False
        self._squares: list[float] = []  # of the step's micro-gradients
        self._sum_square = 0.0
        self._before: list[Tensor] = []  # the sum of the micro-gradients before the last one
        self._begin(plan.accumulation)

    def after_backward(self) -> None:
        """Gradients were added."""
        if self._is_measuring:
            self._note()

    def after_batch(self) -> None:
        """A micro-batch has ended.

        Raises:
            Over: It was the last one.
        """
        self._num_batches += 1
        plan = self._plan
        if self._num_batches < (plan.num_micro if self._is_measuring else plan.accumulation):
            return
        self._num_batches = 0
        self._num_made += 1
        self._step_schedules()
        if not self._is_measuring:
            if self._num_made >= plan.num_lead or self._is_late():
                self._num_lead, self._is_measuring = self._num_made, True
                self._begin(plan.num_micro)
            return
        self._end_measured()
        num_measured = self._num_made - self._num_lead
        if num_measured >= plan.num_measured or (num_measured >= MIN_STEPS and self._is_late()):
            raise self.Over

    def _begin(self, num_micro: int) -> None:
        """From now on accumulate so many; it is by the number of a batch that the loop tells where a window begins."""
        self._trainer.accumulate_grad_batches = num_micro
        progress = self._trainer.fit_loop.epoch_loop.batch_progress.current
        progress.ready += -progress.ready % num_micro

    def _step_schedules(self) -> None:
        """Step the schedules of a run that count optimizer steps, as its loop would after so many; not beyond its end.

        Those of the model's own making are left to the model.
        """
        if self._num_made >= self._num_run_steps:
            return
        for config in list(self._schedules):
            if self._num_made * self._plan.accumulation % config.frequency:
                continue
            try:
                type(config.scheduler).step(config.scheduler)
            except Exception as error:  # another signature, or one that ends before the run does, which will tell
                _log.info("a pilot goes on without the schedule %s: %s", type(config.scheduler).__name__, error)
                self._schedules.remove(config)

    @torch.no_grad()
    def _note(self) -> None:
        """Take the squares of what a backward has added to the gradients."""
        gradients = [each.grad.detach() for each in self._module.parameters() if each.grad is not None]
        is_last = len(self._squares) >= self._plan.num_micro - 1
        if self._num_ranks == 1:
            self._squares.append(self._added(gradients))
            self._before.clear()  # first: a third set of gradients may not fit
            if not is_last:
                self._before.extend(each.clone() for each in gradients)
        else:  # the last ones are reduced, so they are no rank's own any more
            self._squares.append(_square(gradients) if not self._squares else 0.0)
        if is_last:
            self._sum_square = _square(gradients)

    def _added(self, gradients: list[Tensor]) -> float:
        """The square of what the last backward added."""
        if not self._squares:
            return _square(gradients)
        if len(self._before) != len(gradients):  # parameters that are not used by every batch
            return math.inf
        return _square(after - before for after, before in zip(gradients, self._before, strict=True))

    def _end_measured(self) -> None:
        """Take a measured step, unless a batch had no backward, or several."""
        found, self._squares = self._squares, []
        self._before.clear()
        num_micro = self._plan.num_micro
        if len(found) != num_micro:
            return
        scaler = getattr(self._trainer.precision_plugin, "scaler", None)
        scale = float(scaler.get_scale()) ** 2 if scaler is not None else 1.0
        squares = found if self._num_ranks == 1 else found[:1]
        # each loss was divided by their number
        micro = num_micro**2 * sum(squares) / len(squares)
        self.measured.append(
            GradientSquares(
                micro=micro / scale,
                mean=self._sum_square / scale,
                num_micro=num_micro * self._num_ranks,
                micro_size=self._micro_size,
            )
        )


def _square(tensors: Iterable[Tensor]) -> float:
    squares = [each.double().pow(2).sum() for each in map(_dense, tensors)]
    return float(torch.stack(squares).sum()) if squares else 0.0


def _dense(tensor: Tensor) -> Tensor:
    return tensor.coalesce().values() if tensor.is_sparse else tensor
