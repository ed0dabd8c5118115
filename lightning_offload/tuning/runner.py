"""Trials of a batch size: a few timed training steps on every rank, whatever trains, and the search over them.

The one engine of the Lightning callback and of the decorator. What trains is a :class:`Host`: it trains at a size and
tells a :class:`StepMeter` of each step, until that ends the trial by an exception which passes through whatever trains
(a ``BaseException``: ``except Exception`` lets it through, ``finally`` and ``with`` run).

Several ranks go in rounds: after each step, and when its host ends in any other way, a rank says how it fares, and all
stop in the round in which one has to. DDP exchanges no gradients before the first timed step, so that no rank waits for
those of one that ran out of memory; then a size is known to fit on all, and gradients are exchanged as in the training.
Other collectives within a step remain unsafe where sizes may not fit: an out-of-memory error on one rank leaves the
others waiting there. An error of one rank that comes before the timed steps is an error on all.

The first trials are *recorded* where a memory plugin shows their steps: a performance model is fitted to these, which
predicts the sizes that are not tried. They are trials like any other to the search.
"""

from __future__ import annotations

import contextlib
import gc
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel

from lightning_offload.accelerators import memory_in_use
from lightning_offload.errors import BudgetInfeasibleError, OffloadError, TuningError, UnsupportedError
from lightning_offload.plugins.memory import MemoryPlugin, attached_plugins
from lightning_offload.plugins.out_of_memory import release_frames
from lightning_offload.plugins.plan_cache import every_shape_recorded
from lightning_offload.tuning.acquisition import Space
from lightning_offload.tuning.predictions import Predictor, Recorded
from lightning_offload.tuning.ranks import STOPPED, Coordinator, agreed
from lightning_offload.tuning.search import MAX_TRIALS_PREDICTED, SearchResult, find_batch_size
from lightning_offload.tuning.trial import Predict, Prediction, Trial
from lightning_offload.units import format_bytes

__all__ = ["ENDED_EARLY", "Host", "RankStatus", "StepMeter", "TrialOver", "TrialRunner", "TrialSettings"]

ENDED_EARLY = "training ended after"
"""How the reason of a trial begins whose host returned before anything could be timed."""
_RECORDED_SHARE = 4
"""Of so many trials one goes to a size that the performance model is fitted to."""
_SMALLEST_RECORDED = 2  # libraries take shortcuts for a single sample


class TrialOver(BaseException):
    """Ends a trial from inside whatever trains."""


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
        warmup_steps: Steps that are not timed.
        timed_steps: Steps that are.
        memory: A plugin whose peak and budget count, beside those that are attached and have steps in the trial.
        clock: Seconds, from any start.
        is_out_of_memory: Whether an error other than :class:`torch.OutOfMemoryError` says that a size does not fit.
        allows_sync_batch_norm: Whether the host sees to it that no size is tried with it that may not fit.
    """

    warmup_steps: int = 4
    timed_steps: int = 5
    memory: MemoryPlugin | None = None
    clock: Callable[[], float] = time.perf_counter
    is_out_of_memory: Callable[[Exception], bool] = lambda _: False
    allows_sync_batch_norm: bool = False


class StepMeter:
    """Collects the steps of one trial on this rank, and ends it once there are enough.

    Args:
        settings: How long the trial is.
        agreement: Among the ranks.

    Attributes:
        step_seconds: Of the timed steps.
        num_steps: Steps so far, warm-up included.
        peak_bytes: The largest after the warm-up; None where it is not known.
        excess: Why the steps do not fit though none failed; empty where they do.
        status: Of the worst rank in the round that ended the trial; None while it goes on.
        recorded: What a memory plugin showed; None without one.
        exchanges: Whether ranks exchange their gradients by now.
    """

    def __init__(self, settings: TrialSettings, agreement: Coordinator) -> None:
        self.step_seconds: list[float] = []
        self.num_steps = 0
        self.peak_bytes: int | None = None
        self.excess = ""
        self.status: RankStatus | None = None
        self.recorded: Recorded | None = None
        self.exchanges = False
        # with several ranks the first step shows that a size fits on all
        self._num_warmup = max(settings.warmup_steps, 1 if agreement.num_ranks > 1 else 0)
        self._withheld = contextlib.ExitStack()
        self._settings = settings
        self._agreement = agreement
        self._num_before: weakref.WeakKeyDictionary[MemoryPlugin, int] = weakref.WeakKeyDictionary()
        self._num_retries = 0

    @contextlib.contextmanager
    def measuring(self) -> Iterator[None]:
        """Measure what trains inside."""
        with self._withheld:
            if self._agreement.num_ranks > 1:
                allows = self._settings.allows_sync_batch_norm
                self._withheld.enter_context(gradient_sync_off(allows_sync_batch_norm=allows))
            self._num_before.update({each: each.report().num_steps for each in attached_plugins()})
            self._watch_allocator()
            self._end_warmup()
            yield

    def step_took(self, seconds: float, *, counts: bool = True) -> None:
        """Count a step that has ended.

        Args:
            seconds: What it took, the device's work included.
            counts: Whether it is one of the trial's size.

        Raises:
            TrialOver: There are enough, or a rank has to stop.
        """
        if self.status is not None:
            raise TrialOver  # what trains went on after it was stopped
        settings = self._settings
        self.num_steps += counts
        is_warm = self.num_steps > self._num_warmup
        if is_warm and counts:
            self.step_seconds.append(seconds)
            self._look_at_memory()
        status = RankStatus.GOES_ON
        if len(self.step_seconds) >= settings.timed_steps:
            status = RankStatus.HAS_ENOUGH
        if self.excess:
            status = RankStatus.DOES_NOT_FIT
        if self.ends(status) is not RankStatus.GOES_ON:
            raise TrialOver
        if not is_warm:
            self._end_warmup()

    def _end_warmup(self) -> None:
        """All ranks have made as many steps; after these they exchange gradients."""
        if self.num_steps == self._num_warmup:
            self._watch_allocator()
            self._withheld.close()
            self.exchanges = True

    def ends(self, status: RankStatus) -> RankStatus:
        """Tell the other ranks how this one fares; the worst of all."""
        worst = RankStatus(int(self._agreement.largest(status)))
        if worst is not RankStatus.GOES_ON:
            self.status = worst
        return worst

    def trial(self, batch_size: int, status: RankStatus, reason: str) -> Trial:
        """What this rank's steps were, by how it has ended and why their size does not fit, when all have stopped."""
        seconds, reason = tuple(self.step_seconds), reason or self.excess
        if not reason and self.status is RankStatus.DOES_NOT_FIT:
            reason = STOPPED
        if not reason and not seconds:
            needed = self._settings.warmup_steps + 1
            early = f"{ENDED_EARLY} {self.num_steps} optimizer steps of whole batches, a trial takes at least {needed}"
            reason = early if status is RankStatus.ENDED else STOPPED
        if not reason:
            return Trial.from_steps(batch_size, seconds, peak_bytes=self.peak_bytes)
        return Trial(
            batch_size=batch_size, is_ok=False, peak_bytes=self.peak_bytes, step_seconds=seconds, reason=reason
        )  # fmt: skip

    def _watch_allocator(self) -> None:
        memory = memory_in_use()
        if memory is not None:
            memory.reset_peak()
            self._num_retries = memory.num_retries()

    def _look_at_memory(self) -> None:
        """Read the peaks; the warm-up is over, so that plans are in force. A single plugin tells of its steps too."""
        memory = memory_in_use()
        if memory is not None:
            self.peak_bytes = memory.peak_bytes()
            if memory.num_retries() > self._num_retries:
                self.excess = "the allocator had to free its cache to go on: memory is as good as full"
        given = [self._settings.memory] if self._settings.memory is not None else []
        attached = [each for each in attached_plugins() if each.report().num_steps > self._num_before.get(each, 0)]
        plugins = list({id(each): each for each in (*given, *attached)}.values())
        for plugin in plugins:
            measured, budget = plugin.report(of_last=True).measured_peak_bytes, plugin.budget_bytes
            if measured is None:
                continue
            self.peak_bytes = max(self.peak_bytes or 0, measured)
            if budget is not None and measured > budget:
                self.excess = f"peak {format_bytes(measured)} is above the budget {format_bytes(budget)}"
        if len(plugins) == 1:
            self.recorded = Recorded.of(plugins[0], self.step_seconds[-1])


_SYNC_FLAGS = {  # DDP reads them in its forward
    "require_backward_grad_sync": False,
    "require_forward_param_sync": False,
    "_static_graph_delay_allreduce_enqueued": True,
}


@contextlib.contextmanager
def gradient_sync_off(*, allows_sync_batch_norm: bool = False) -> Iterator[None]:
    """Inside, models under DDP exchange nothing, as under its ``no_sync``, in a static graph's first step neither.

    Args:
        allows_sync_batch_norm: Whether a model may have it: its ranks wait for one another within a step.
    """
    before: dict[int, dict[str, Any]] = {}

    def withhold(module: nn.Module, _: Any) -> None:
        if not isinstance(module, DistributedDataParallel):
            return
        if not allows_sync_batch_norm and any(isinstance(part, nn.SyncBatchNorm) for part in module.modules()):
            raise UnsupportedError(
                "a batch size cannot be tried with SyncBatchNorm: a rank that runs out of memory would leave the "
                "others waiting; use batch norm without synchronisation, or set the batch size yourself"
            )
        before[id(module)] = {name: vars(module)[name] for name in _SYNC_FLAGS if name in vars(module)}
        vars(module).update({name: _SYNC_FLAGS[name] for name in before[id(module)]})

    def put_back(module: nn.Module, *_: Any) -> None:
        vars(module).update(before.pop(id(module), {}))

    with contextlib.ExitStack() as hooks:
        hooks.callback(register_module_forward_pre_hook(withhold).remove)
        hooks.callback(register_module_forward_hook(put_back, always_call=True).remove)
        yield


class Host(Protocol):
    """What trains in trials."""

    def train(self, batch_size: int, meter: StepMeter) -> None:
        """Train at a size and tell the meter of each step, until it raises :class:`TrialOver`.

        Returning earlier is possible; what was timed until then counts. Whatever else is raised fails the trial where
        it says that the size does not fit, and the search otherwise.
        """

    def restore(self) -> None:
        """Put back whatever trials have changed. Called after each; not collective."""

    def refusal(self, batch_size: int, trials: Sequence[Trial], predict: Predict) -> str:
        """Why a size is not tried; empty where it is. Collective, and the same on every rank.

        Args:
            batch_size: The size.
            trials: Those so far.
            predict: Predicts any size, on all ranks; None where nothing can.
        """


class TrialRunner:
    """The trials of one search.

    Args:
        host: What trains.
        settings: How long a trial is.
        agreement: Among the ranks.
        tell: Told the size of each trial before it begins.

    Attributes:
        done: The trials that ran.
        predictor: Of sizes that did not, on rank zero; None where nothing showed it enough, and before :meth:`find`.
    """

    def __init__(
        self,
        host: Host,
        settings: TrialSettings,
        agreement: Coordinator,
        *,
        tell: Callable[[int], object] = lambda _: None,
    ) -> None:
        self.done: list[Trial] = []
        self.predictor: Predictor | None = None
        self._host, self._settings, self._agreement, self._tell = host, settings, agreement, tell
        self._recorded: dict[int, Recorded | None] = {}

    @every_shape_recorded()
    def find(
        self,
        space: Space,
        *,
        max_trials: int | None,
        until: Callable[[Sequence[Trial]], float],
    ) -> SearchResult:
        """Find the efficiency-optimal size; every rank calls it, and all get the same.

        Args:
            space: What is searched.
            max_trials: Most trials, None for the usual number.
            until: No trial begins that would probably end after that time, by what trials have shown; infinite for no
                limit. Rank zero's clock counts.

        Raises:
            TuningError: No size was found to fit, or a rank failed.
        """
        clock = self._settings.clock
        most = max(1, (max_trials or MAX_TRIALS_PREDICTED) // _RECORDED_SHARE)
        self._record(space, most, until)
        if self._agreement.rank == 0:
            recorded = {size: each for size, each in self._recorded.items() if each is not None}
            self.predictor = Predictor.fit(recorded, self.done, self._agreement.num_ranks)
        return find_batch_size(
            self.run,
            space,
            max_trials=max_trials,
            max_seconds=until(self.done) - clock(),
            predict=self.predictor,
            clock=clock,
            known=self.done,
            agreement=self._agreement,
        )

    def run(self, batch_size: int) -> Trial:
        """Try a size on every rank, unless the host refuses; each leaves with the same trial, and as it was.

        Raises:
            TuningError: Another rank failed.
            Exception: Whatever the host raised on this one, unless it says that the size does not fit.
        """
        self._tell(batch_size)
        refusal = self._host.refusal(batch_size, self.done, self._predict)
        if refusal:
            trial = Trial(batch_size=batch_size, is_ok=False, reason=refusal)
        else:
            trial = self._tried(batch_size)
        self.done.append(trial)
        return trial

    # ---- recording

    def _record(self, space: Space, most: int, until: Callable[[Sequence[Trial]], float]) -> None:
        """Try a few sizes first, as long as a memory plugin shows their steps."""
        waiting = [space.start]
        has_spread = False
        while waiting and len(self._recorded) < most and len(self.done) < 2 * most and not self._is_late(until):
            size = waiting.pop(0)
            trial = next((trial for trial in self.done if trial.batch_size == size), None)
            if trial is None:
                # what is refused is no trial yet: the search may never come to it
                if not space.allows(size) or self._host.refusal(size, self.done, self._predict):
                    continue
                trial = self.run(size)
            if not trial.is_ok:
                waiting = waiting if has_spread else [size // 4]
            elif not self._agreement.is_true_on_all(None not in self._recorded.values()):
                return
            elif not has_spread:
                has_spread = True
                smallest = max(space.low, _SMALLEST_RECORDED)
                waiting += [other for other in (2 * size, size // 2, 4 * size) if other >= smallest]

    def _is_late(self, until: Callable[[Sequence[Trial]], float]) -> bool:
        return bool(self.done) and self._agreement.broadcast(self._settings.clock() >= until(self.done))

    def _predict(self, batch_size: int) -> Prediction | None:
        """Predict a size, on all ranks; None where nothing can."""
        return self._agreement.broadcast(None if self.predictor is None else self.predictor(batch_size))

    # ---- one trial

    def _tried(self, batch_size: int) -> Trial:
        meter = StepMeter(self._settings, self._agreement)
        try:
            trial = self._measured(batch_size, meter)
        except BaseException:
            self._host.restore()
            raise
        self._agreement.together(self._host.restore, f"putting back what the trial of batch size {batch_size} changed")
        if trial.is_ok:
            self._recorded[batch_size] = meter.recorded
        return trial

    def _measured(self, batch_size: int, meter: StepMeter) -> Trial:
        agreement = self._agreement
        status, reason, failure = self._trained(batch_size, meter)
        if meter.status is None and meter.exchanges and agreement.num_ranks > 1 and status > RankStatus.ENDED:
            # the others wait for its gradients, as they would in the training: no fit goes on after that
            raise failure or OffloadError(
                f"batch size {batch_size} fit this rank at first, and then not ({reason}), while others wait for its"
                " gradients: set max_val below it"
            )
        if meter.status is None:
            meter.ends(status)
        what = f"training at batch size {batch_size}"
        agreement.raise_together(failure, what)  # whether it came before all had stopped, or after
        if meter.status is RankStatus.FAILED:
            raise TuningError(f"{what} failed on another rank: see its error")
        return agreed(meter.trial(batch_size, status, reason), agreement)

    def _trained(self, batch_size: int, meter: StepMeter) -> tuple[RankStatus, str, Exception | None]:
        """Let the host train; how that ended, why the size does not fit, and what else was raised."""
        status, reason, failure = RankStatus.ENDED, "", None
        try:
            with meter.measuring():
                self._host.train(batch_size, meter)
        except TrialOver as over:
            status = RankStatus.HAS_ENOUGH
            release_frames(over)
        except Exception as error:
            reason = self._why_it_does_not_fit(error)
            if reason:
                status = RankStatus.DOES_NOT_FIT
                release_frames(error)
            else:
                status, failure = RankStatus.FAILED, error
        finally:
            memory = memory_in_use()
            if status is RankStatus.DOES_NOT_FIT or memory is not None:
                gc.collect()
            if memory is not None:
                memory.give_back()  # so that a trial's memory is not that of the one before it
        return status, reason, failure

    def _why_it_does_not_fit(self, error: Exception) -> str:
        """Why a size does not fit, by an error; empty where it says something else."""
        if isinstance(error, BudgetInfeasibleError):
            return f"needs a budget of {format_bytes(error.floor_bytes)}"
        if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
            return "out of memory"
        return str(error).partition("\n")[0] if self._settings.is_out_of_memory(error) else ""
