"""Times the steps of a trial of a batch size, whatever trains, and says when it is over.

A *step* is one backward, a batch of the trial's size; the clock is read each time that the optimizer which stepped
first has stepped again, and the time is divided by the backwards in between. The exchange of gradients among ranks is
withheld (:mod:`lightning_offload.tuning.allreduce_cost`).
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from statistics import median
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from lightning_offload.plugins.memory import MemoryPlugin, attached_plugins
from lightning_offload.runtime.hooks import watch_backward
from lightning_offload.tuning.allreduce_cost import GradientSyncOff
from lightning_offload.tuning.predictions import Recorded
from lightning_offload.tuning.ranks import Coordinator
from lightning_offload.units import format_bytes

__all__ = ["IsOutOfMemory", "RankStatus", "Seen", "StepMeter", "TrialOver", "TrialSettings"]

IsOutOfMemory = Callable[[Exception], bool]


class TrialOver(BaseException):
    """Ends a trial from inside the training function."""


class RankStatus(IntEnum):
    """How a rank fares in a round, from good to bad."""

    GOES_ON = 0
    HAS_ENOUGH = 1
    ENDED = 2
    DOES_NOT_FIT = 3
    FAILED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialSettings:
    """How long a trial is, and what it is measured with.

    Attributes:
        warmup_steps: Optimizer steps that are not timed.
        timed_steps: Optimizer steps that are.
        memory: A plugin whose peak and budget count, beside those that are attached and have steps in the trial.
        clock: Seconds.
        is_out_of_memory: Whether an error other than :class:`torch.OutOfMemoryError` says that a size does not fit.
    """

    warmup_steps: int = 4
    timed_steps: int = 5
    memory: MemoryPlugin | None = None
    clock: Callable[[], float] = time.perf_counter
    is_out_of_memory: IsOutOfMemory = lambda _: False


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What a memory plugin tells of a trial's steps.

    Attributes:
        recorded: The step, its peak and its times.
        policy: Who plans.
        budget_bytes: The budget, None for no limit.
    """

    recorded: Recorded
    policy: str
    budget_bytes: int | None

    @classmethod
    def of(cls, memory: MemoryPlugin, step_seconds: list[float]) -> Seen:
        """Read a plugin after a step that was timed."""
        report = memory.report()
        fixed = max(0.0, step_seconds[-1] - (report.measured_step_seconds or step_seconds[-1]))
        recorded = Recorded(
            planned=report.planned,
            peak_bytes=report.measured_peak_bytes,
            fixed_seconds=fixed,
            step_seconds=median(step_seconds),
        )
        return cls(recorded=recorded, policy=memory.policy, budget_bytes=memory.budget_bytes)


class StepMeter:
    """Times the steps of whatever trains while it is entered, and ends it once there are enough."""

    def __init__(self, settings: TrialSettings, agreement: Coordinator) -> None:
        self.step_seconds: list[float] = []
        self.num_steps = 0
        self.peak_bytes: int | None = None
        self.excess = ""
        self.fate: RankStatus | None = None
        self.seen: Seen | None = None
        self.withheld = GradientSyncOff()
        self._settings = settings
        self._agreement = agreement
        self._first: weakref.ref[torch.optim.Optimizer] | None = None
        self._num_before: weakref.WeakKeyDictionary[MemoryPlugin, int] = weakref.WeakKeyDictionary()
        self._num_backwards = 0
        self._since = 0.0

    @contextlib.contextmanager
    def measuring(self) -> Iterator[None]:
        """Measure what trains inside."""
        with contextlib.ExitStack() as stack:
            stack.callback(register_optimizer_step_post_hook(self._after_optimizer_step).remove)
            stack.callback(watch_backward(self._around_backward))
            if self._agreement.num_ranks > 1:
                stack.enter_context(self.withheld)
            if torch.cuda.is_available() and torch.cuda.is_initialized():
                torch.cuda.reset_peak_memory_stats()
            self._num_before.update({each: each.report().num_steps for each in attached_plugins()})
            yield

    def ends(self, fate: RankStatus) -> RankStatus:
        """Tell the other ranks how this one fares; the worst of all."""
        worst = RankStatus(int(self._agreement.largest([float(fate)])[0]))
        if worst is not RankStatus.GOES_ON:
            self.fate = worst
        return worst

    @contextlib.contextmanager
    def _around_backward(self) -> Iterator[None]:
        if torch._C._current_graph_task_id() == -1:
            self._num_backwards += 1
        yield

    def _after_optimizer_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._first is None:
            self._first = weakref.ref(optimizer)
        if self._first() is not optimizer:
            return  # one of several; a step of all of them is over when the first steps again
        if self.fate is not None:
            raise TrialOver  # the function went on after it was stopped
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        seconds = self._settings.clock() - self._since
        self.num_steps += 1
        if self.num_steps > self._settings.warmup_steps:
            self.step_seconds.append(seconds / max(1, self._num_backwards))
        self._look_at_plugins()
        fate = RankStatus.GOES_ON
        if len(self.step_seconds) >= self._settings.timed_steps:
            fate = RankStatus.HAS_ENOUGH
        if self.excess:
            fate = RankStatus.DOES_NOT_FIT
        if self.ends(fate) is not RankStatus.GOES_ON:
            raise TrialOver
        self._num_backwards = 0
        self._since = self._settings.clock()

    def _look_at_plugins(self) -> None:
        """Read the peaks; those of a plugin count once its plan is in force. A single one tells of its steps too."""
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            self.peak_bytes = torch.cuda.max_memory_allocated()
        if self.num_steps < self._settings.warmup_steps:
            return
        given = [self._settings.memory] if self._settings.memory is not None else []
        attached = [each for each in attached_plugins() if each.report().num_steps > self._num_before.get(each, 0)]
        plugins = list({id(each): each for each in (*given, *attached)}.values())
        for memory in plugins:
            measured, budget = memory.report().measured_peak_bytes, memory.budget_bytes
            if measured is None:
                continue
            self.peak_bytes = max(self.peak_bytes or 0, measured)
            if budget is not None and measured > budget:
                self.excess = f"peak {format_bytes(measured)} is above the budget {format_bytes(budget)}"
        if len(plugins) == 1 and self.step_seconds:
            self.seen = Seen.of(plugins[0], self.step_seconds)
