"""Trials of a batch size with the user's own training function, which is stopped once enough is known.

Protocol: a trial calls the function with a batch size, inside a :class:`StepMeter`, and the meter ends it from inside
an optimizer step, by an exception that passes through the function (a ``BaseException``: ``except Exception`` lets it
through, ``finally`` and ``with`` run). A *step* is one backward, a batch of that size; the meter's clock is read each
time that the optimizer which stepped first has stepped again, and the time is divided by the backwards in between.

Several ranks go in rounds: at each reading of the clock, and when its function ends in any other way, a rank says how
it fares, and all stop in the round in which one has to. Gradients are not synchronised during trials, so that none
waits for those of a rank that ran out of memory; throughput is that without their all-reduce. Collectives of the
function's own between the start of a step and its optimizer step remain unsafe: an out-of-memory error on one rank
leaves the others waiting there.
"""

from __future__ import annotations

import contextlib
import gc
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import IntEnum
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

from lightning_offload.errors import BudgetInfeasibleError, TuningError, UnsupportedError
from lightning_offload.plugins.memory import MemoryPlugin
from lightning_offload.plugins.module_steps import following_plugins
from lightning_offload.runtime.step_mode import watch_backward
from lightning_offload.tuning.agreement import Agreement, agreed
from lightning_offload.tuning.trial import Trial
from lightning_offload.units import format_bytes

IsOutOfMemory = Callable[[Exception], bool]


class TrialOver(BaseException):
    """Ends a trial from inside the training function."""


class Fate(IntEnum):
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
        memory: A plugin whose peak and budget count, beside those that follow a model.
        clock: Seconds.
        is_out_of_memory: Whether an error other than :class:`torch.OutOfMemoryError` says that a size does not fit.
    """

    warmup_steps: int = 4
    timed_steps: int = 5
    memory: MemoryPlugin | None = None
    clock: Callable[[], float] = time.perf_counter
    is_out_of_memory: IsOutOfMemory = lambda _: False


class StepMeter:
    """Times the steps of whatever trains while it is entered, and ends it once there are enough."""

    def __init__(self, settings: TrialSettings, agreement: Agreement) -> None:
        self.step_seconds: list[float] = []
        self.num_steps = 0
        self.peak_bytes: int | None = None
        self.excess = ""
        self.fate: Fate | None = None
        self._settings = settings
        self._agreement = agreement
        self._first: weakref.ref[torch.optim.Optimizer] | None = None
        self._num_backwards = 0
        self._since = 0.0

    @contextlib.contextmanager
    def measuring(self) -> Iterator[None]:
        """Measure what trains inside."""
        with contextlib.ExitStack() as stack:
            stack.callback(register_optimizer_step_post_hook(self._after_optimizer_step).remove)
            stack.callback(watch_backward(self._around_backward))
            if self._agreement.num_ranks > 1:
                stack.callback(register_module_forward_pre_hook(_stop_synchronising).remove)
            if torch.cuda.is_available() and torch.cuda.is_initialized():
                torch.cuda.reset_peak_memory_stats()
            yield

    def ends(self, fate: Fate) -> Fate:
        """Tell the other ranks how this one fares; the worst of all."""
        worst = Fate(int(self._agreement.largest([float(fate)])[0]))
        if worst is not Fate.GOES_ON:
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
        self._note_peak()
        fate = Fate.GOES_ON
        if len(self.step_seconds) >= self._settings.timed_steps:
            fate = Fate.HAS_ENOUGH
        if self.excess:
            fate = Fate.DOES_NOT_FIT
        if self.ends(fate) is not Fate.GOES_ON:
            raise TrialOver
        self._num_backwards = 0
        self._since = self._settings.clock()

    def _note_peak(self) -> None:
        """Read the peaks; those of a plugin count once its plan is in force."""
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            self.peak_bytes = torch.cuda.max_memory_allocated()
        if self.num_steps < self._settings.warmup_steps:
            return
        given = [self._settings.memory] if self._settings.memory is not None else []
        for memory in {id(each): each for each in (*given, *following_plugins())}.values():
            measured, budget = memory.report().measured_peak_bytes, memory.budget_bytes
            if measured is None:
                continue
            self.peak_bytes = max(self.peak_bytes or 0, measured)
            if budget is not None and measured > budget:
                self.excess = f"peak {format_bytes(measured)} is above the budget {format_bytes(budget)}"


def _stop_synchronising(module: nn.Module, _: Any) -> None:
    """Before each forward: DDP reads both flags in it. Whoever owns the model puts them back."""
    if isinstance(module, DistributedDataParallel):
        module.require_backward_grad_sync = False
        module.require_forward_param_sync = False
        if any(isinstance(part, nn.SyncBatchNorm) for part in module.modules()):
            raise UnsupportedError(
                "a batch size cannot be tried with SyncBatchNorm: a rank that runs out of memory would leave the "
                "others waiting; use batch norm without synchronisation, or set the batch size yourself"
            )


def run_trial(function: Callable[[int], Any], batch_size: int, settings: TrialSettings, agreement: Agreement) -> Trial:
    """Try a batch size; every rank calls it, and all get the same trial.

    Args:
        function: Trains with a batch size.
        batch_size: The size.
        settings: How long.
        agreement: Among the ranks.

    Raises:
        TuningError: The function failed on another rank.
        Exception: Whatever the function raised on this one, unless it says that the size does not fit.
    """
    meter = StepMeter(settings, agreement)
    reason = ""
    try:
        with meter.measuring():
            function(batch_size)
        fate = Fate.ENDED
    except TrialOver as over:
        fate = Fate.HAS_ENOUGH
        _release(over)
    except Exception as error:
        does_not_fit = isinstance(error, (torch.OutOfMemoryError, BudgetInfeasibleError))
        if not (does_not_fit or settings.is_out_of_memory(error)):
            if meter.fate is None:
                meter.ends(Fate.FAILED)
            raise
        fate, reason = Fate.DOES_NOT_FIT, str(error).partition("\n")[0]
        _release(error)
    finally:
        _free_device_memory()
    if meter.fate is None:
        meter.ends(fate)
    trial = agreed(_trial(batch_size, meter, reason or meter.excess, settings), agreement)
    if trial.is_ok or agreement.num_ranks == 1:
        return trial
    reasons = agreement.gather(reason or meter.excess)  # the first rank that failed may have stopped for another
    told = next((f"rank {rank}: {each}" for rank, each in enumerate(reasons) if each), trial.reason)
    return replace(trial, reason=told)


def _trial(batch_size: int, meter: StepMeter, reason: str, settings: TrialSettings) -> Trial:
    if meter.fate is Fate.FAILED:
        raise TuningError(f"the training function failed on another rank at batch size {batch_size}: see its error")
    if meter.fate is Fate.DOES_NOT_FIT:
        reason = reason or "another rank stopped"
    elif not meter.step_seconds:
        needed = settings.warmup_steps + 1
        reason = f"training ended after {meter.num_steps} optimizer steps, a trial takes at least {needed}"
    seconds = tuple(meter.step_seconds)
    is_ok = not reason
    return Trial(
        batch_size=batch_size,
        is_ok=is_ok,
        samples_per_second=batch_size / median(seconds) if is_ok else None,
        peak_bytes=meter.peak_bytes,
        step_seconds=seconds,
        reason=reason,
    )


def _release(error: BaseException) -> None:
    """Let go of what an exception keeps alive: its traceback holds the function's frames, and they its tensors."""
    traceback.clear_frames(error.__traceback__)
    error.__traceback__ = error.__context__ = error.__cause__ = None


def _free_device_memory() -> None:
    gc.collect()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
