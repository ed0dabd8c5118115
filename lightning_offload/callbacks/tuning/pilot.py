"""A pilot: real optimizer steps on batches that are all different, which show how noisy gradients are.

Trials cannot: they repeat one batch. At initialisation the noise scale says nothing of the training, and it rises. So
the first half of a pilot's batches is trained on as in the run, as far into it as the pilot may go; the noise scale is
measured in the second half. The beginning shows how long gradients take to settle.

A measured step accumulates at least four micro-batches of the configured size, whose gradients are independent; so
batch norm is as it is in the training. With one rank each micro-gradient is what a backward adds to the gradients, with
several it is each rank's first, before they are reduced. Squares are taken after a backward: before gradients are
clipped, and divided by the GradScaler's scale.

Everything is put back afterwards. The rates are those of the run, by its schedules as far as these count steps, so a
measured step that accumulates more micro-batches than the run does is larger in samples, not in parameters. A schedule
that cannot be stepped here, or that ends, stays where it is.
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
_NUM_FIRST = 32
"""First steps of a training, in which gradients settle or are said not to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PilotPlan:
    """The optimizer steps of a pilot, in this order.

    Attributes:
        num_first: As the run makes them, watched to see gradients settle.
        num_lead: As the run makes them.
        num_measured: Those that the noise scale is measured in.
        accumulation: Micro-batches of a step as the run makes it.
        num_micro: Micro-batches of a measured step.
    """

    num_first: int
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
    num_before = num_measured * num_micro // accumulation
    num_first = min(_NUM_FIRST, num_before)
    return PilotPlan(
        num_first=num_first, num_lead=num_before - num_first, num_measured=num_measured, accumulation=accumulation,
        num_micro=num_micro,
    )  # fmt: skip


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
        first: Squares of the gradients of the first steps.
        measured: Those of the measured ones.
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
        watched = {"micro_size": micro_size, "num_ranks": num_ranks}
        first = _GradientWatch(trainer, module, num_micro=plan.accumulation, **watched)
        measured = _GradientWatch(trainer, module, num_micro=plan.num_micro, **watched)
        self.first, self.measured = first.steps, measured.steps
        self._parts = iter(
            (
                (plan.num_first, plan.accumulation, first),
                (plan.num_lead, plan.accumulation, None),
                (plan.num_measured, plan.num_micro, measured),
            )
        )
        self._schedules = _ScheduleSteps(trainer, num_steps)
        self._accumulation = plan.accumulation
        self._num_left = self._num_made = self._num_batches = self._num_micro = 0
        self._watch: _GradientWatch | None = None
        self._begin_part()

    def after_backward(self) -> None:
        """Gradients were added."""
        if self._watch is not None:
            self._watch.note()

    def after_batch(self) -> None:
        """A micro-batch has ended.

        Raises:
            Over: It was the last one.
        """
        self._num_batches += 1
        if self._num_batches < self._num_micro:
            return
        self._num_batches = 0
        if self._watch is not None:
            self._watch.end_step()
        self._num_made += 1
        self._num_left -= 1
        self._schedules.made_step(self._accumulation)
        if self._num_left <= 0 or (self._num_made >= MIN_STEPS and self._is_late()):
            self._begin_part()

    def _begin_part(self) -> None:
        self._num_left = 0
        while not self._num_left:
            part = next(self._parts, None)
            if part is None:
                raise self.Over
            self._num_left, self._num_micro, self._watch = part
        self._num_made = 0
        self._trainer.accumulate_grad_batches = self._num_micro
        progress = self._trainer.fit_loop.epoch_loop.batch_progress.current
        progress.ready += -progress.ready % self._num_micro  # by which the loop tells where a window begins


class _ScheduleSteps:
    """Steps the schedules of a run that count optimizer steps, as its loop would.

    Those of the model's own making are left to the model. Lightning's hook for it is not called: what it reads may only
    be there in the run.

    Args:
        trainer: Its optimizers and schedules are made.
        num_steps: Optimizer steps of the run, at whose end schedules end.
    """

    def __init__(self, trainer: Any, num_steps: float) -> None:
        configs = [each for each in trainer.strategy.lr_scheduler_configs if each.interval == "step"]
        self._configs = [each for each in configs if not each.reduce_on_plateau]
        self._num_left = num_steps
        self._num_batches = 0

    def made_step(self, num_batches: int) -> None:
        """An optimizer step was made.

        Args:
            num_batches: Batches that the run takes for one.
        """
        self._num_left -= 1
        self._num_batches += num_batches
        if self._num_left <= 0:
            return
        for config in list(self._configs):
            if self._num_batches % config.frequency:
                continue
            try:
                type(config.scheduler).step(config.scheduler)
            except Exception as error:  # another signature, or one that ends before the run does, which will tell
                _log.info("a pilot goes on without the schedule %s: %s", type(config.scheduler).__name__, error)
                self._configs.remove(config)


class _GradientWatch:
    """Takes the squared norms of micro-gradients while a model is trained by Lightning.

    Args:
        trainer: Its precision may have a GradScaler.
        module: The model.
        num_micro: Micro-batches of an optimizer step.
        micro_size: Samples of one, on this rank.
        num_ranks: Ranks that train together.
    """

    def __init__(self, trainer: Any, module: Any, *, num_micro: int, micro_size: int, num_ranks: int) -> None:
        self.steps: list[GradientSquares] = []
        self._trainer, self._module = trainer, module
        self._num_micro, self._micro_size, self._num_ranks = num_micro, micro_size, num_ranks
        self._squares: list[float] = []
        self._sum_square = 0.0
        self._before: list[Tensor] = []

    @torch.no_grad()
    def note(self) -> None:
        """A backward has ended."""
        gradients = [each.grad.detach() for each in self._module.parameters() if each.grad is not None]
        is_last = len(self._squares) >= self._num_micro - 1
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

    def end_step(self) -> None:
        """Take the step, unless a batch had no backward, or several."""
        found, self._squares = self._squares, []
        self._before.clear()
        if len(found) != self._num_micro:
            return
        scale, sum_square = self._scale() ** 2, self._sum_square
        squares = found if self._num_ranks == 1 else found[:1]
        # each loss was divided by their number
        micro = self._num_micro**2 * sum(squares) / len(squares)
        self.steps.append(
            GradientSquares(
                micro=micro / scale,
                mean=sum_square / scale,
                num_micro=self._num_micro * self._num_ranks,
                micro_size=self._micro_size,
            )
        )

    def _scale(self) -> float:
        scaler = getattr(self._trainer.precision_plugin, "scaler", None)
        return float(scaler.get_scale()) if scaler is not None else 1.0


def _square(tensors: Iterable[Tensor]) -> float:
    squares = [each.double().pow(2).sum() for each in map(_dense, tensors)]
    return float(torch.stack(squares).sum()) if squares else 0.0


def _dense(tensor: Tensor) -> Tensor:
    return tensor.coalesce().values() if tensor.is_sparse else tensor
