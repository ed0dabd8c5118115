"""Lightning as the host of trials: its own fit loop runs, on the run's own loaders, until a trial has enough steps.

The loop. What a batch goes through is what it goes through in the training: transfer, hooks of the model and the
strategy, accumulation, precision, gradient clipping, manual optimization. In `quiet` one callback is in the place of
all others, which tells when batches begin and end; loggers log nothing, schedules stand still, nothing is warned of,
and there is no validation. The loop comes to no end by itself: what it counts is moved on, what it is fed is endless.

Recording. Under an offload strategy its own memory plugin records, and what it has learned of sizes that are only
tried is dropped afterwards. Under any other strategy nothing watches, so there is no prediction.

Safety. A rank that runs out of memory leaves its step, and ranks that talk to it within theirs would wait for ever.
Before the first timed step trials exchange no gradients, so under DDP that is only so where the model or the strategy
has collectives of its own: then what may not fit is predicted and not tried.

States. A trial needs what `configure_optimizers` and `train_dataloader` have set up (the model may keep its
optimizers), but nothing of it may be left when the training begins, which makes them anew.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

import torch

from lightning_offload.accelerators import memory_of, synchronize
from lightning_offload.callbacks.tuning.batches import loaders_in
from lightning_offload.callbacks.tuning.data import TrialData
from lightning_offload.callbacks.tuning.pilot import Pilot, PilotPlan
from lightning_offload.callbacks.tuning.targets import Fit
from lightning_offload.callbacks.tuning.trainer_facts import (
    is_batch_norm_shared,
    replaced,
    sharding_of,
    unfreezes_later,
)
from lightning_offload.errors import TuningError
from lightning_offload.lightning_packages import import_from
from lightning_offload.plugins.memory import MemoryPlugin
from lightning_offload.tuning.learning_rate import has_step_hooks
from lightning_offload.tuning.noise_scale import GradientSquares
from lightning_offload.tuning.runner import StepMeter
from lightning_offload.tuning.snapshot import StateSnapshot
from lightning_offload.tuning.trial import Predict, Trial

_SHARE = 0.9  # of the budget that a prediction may fill


def reason_not_to_run_out(trainer: Any, module: Any, allow_oom: bool | None) -> str:
    """Why no trial may run out of memory; empty where one may. What the user says of it counts first."""
    if allow_oom is not None:
        return "" if allow_oom else "allow_oom=False"
    if name := sharding_of(trainer):
        return f"{name} gathers parameters within a step"
    if is_batch_norm_shared(trainer, module):
        return "SyncBatchNorm talks to other ranks within a step"
    return ""


def num_collectives() -> int:
    """How many collectives this process has begun in its groups; where it is another number later, there was one.

    Groups count them, so none is missed: not those of hooks between backward and the optimizer, nor compiled ones.
    """
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return 0
    from torch.distributed.distributed_c10d import _world

    return sum(map(_num_begun, list(_world.pg_map)))


def _num_begun(group: Any) -> int:
    try:
        return int(group._get_sequence_number_for_group())
    except RuntimeError:  # a backend that does not count
        return 0


def roots_of(trainer: Any, module: Any, loaders: Any | None) -> tuple[object, ...]:
    """Whatever a step may change: the model, its data, the loops, and callbacks of the user's own.

    No callback is called in a trial, but hooks of modules that one has registered are. Loaders are those that were
    passed to `fit()`, if any.
    """
    data = [trainer.datamodule] if trainer.datamodule is not None else []
    callbacks = filter(_is_users, trainer.callbacks)
    return (module, trainer.fit_loop, trainer._logger_connector, *data, *loaders_in(loaders), *callbacks)


def _is_users(callback: object) -> bool:
    package = type(callback).__module__.partition(".")[0]
    return package not in ("lightning", "pytorch_lightning", "lightning_offload")


NUM_LEARNING_STEPS = 3
"""Steps of a new shape before its final plan: recorded, verified, measured."""

_FAR = 512
"""Optimizer steps that are more than a batch has."""
_PLACES = ("name", "version", "save_dir", "root_dir", "log_dir")


@contextlib.contextmanager
def quiet(trainer: Any, module: Any, package: str, *callbacks: Any) -> Iterator[None]:
    """Nothing that the fit loop does inside is logged, shown, saved or seen by other callbacks than these."""
    loop, strategy = trainer.fit_loop.epoch_loop, trainer.strategy
    loggers = [_silent_logger(package)(logger) for logger in trainer.loggers]
    profiler = import_from(package, "profilers").PassThroughProfiler()
    changes: list[tuple[Any, dict[str, Any]]] = [
        (trainer, {"callbacks": list(callbacks), "profiler": profiler, "loggers": loggers}),
        (trainer, {"limit_val_batches": 0, "should_stop": False}),
        (module, {"print": _nothing, "log": _by_itself(module.log), "log_dict": _by_itself(module.log_dict)}),
        (trainer.fit_loop, {"max_batches": trainer.fit_loop.max_batches}),
        # the signal is a collective of every batch, in the model's own group
        (loop, {"max_steps": loop.max_steps, "update_lr_schedulers": _nothing, "_broadcast_sigterm_tensor": _nothing}),
        # under manual optimization the model calls it, and its end would come too soon
        *((config.scheduler, {"step": _nothing}) for config in strategy.lr_scheduler_configs),
    ]
    if hasattr(strategy, "_summary"):  # of the plan, which an offload strategy prints
        changes.append((strategy, {"_summary": None}))
    with contextlib.ExitStack() as stack:
        for holder, values in changes:
            stack.enter_context(replaced(holder, **values))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # the run says it of its own
        yield


@functools.cache
def _silent_logger(package: str) -> Any:
    """A class of loggers that log nothing and are in the place of another one, under its name and in its folders."""
    base: Any = import_from(package, "loggers.logger").DummyLogger

    def place(name: str) -> property:
        return property(lambda self: getattr(self._replaced, name, None))

    def init(self: Any, replaced: Any) -> None:
        base.__init__(self)
        self._replaced = replaced

    return type("SilentLogger", (base,), {"__init__": init, **{name: place(name) for name in _PLACES}})


def _by_itself(log: Callable[..., None]) -> Callable[..., None]:
    """The same without waiting for other ranks; what was logged is there for hooks that read it."""

    def log_by_itself(*args: Any, **kwargs: Any) -> None:
        log(*args, **{**kwargs, "sync_dist": False})

    return log_by_itself


def _nothing(*_: Any, **__: Any) -> None:
    """What is shown in a trial is not for anyone."""


class LoopWatch:
    """The callback of a trial: it keeps the fit loop from ending, and tells whom it is for.

    Attributes:
        num_batches: Those that have ended.
    """

    def __init__(
        self,
        *,
        before_batch: Callable[[], None] = _nothing,
        after_backward: Callable[[], None] = _nothing,
        after_batch: Callable[[], None] = _nothing,
    ) -> None:
        self.num_batches = 0
        self._before_batch, self._after_backward, self._after_batch = before_batch, after_backward, after_batch

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Move the end on: no batch of a trial is the last one of anything, by the numbers that a step may use."""
        loop = trainer.fit_loop
        loop.max_batches = max(loop.max_batches, batch_idx + trainer.accumulate_grad_batches + 2)
        if loop.epoch_loop.max_steps != -1 and loop.epoch_loop.max_steps <= trainer.global_step + _FAR:
            loop.epoch_loop.max_steps = trainer.global_step + 2 * _FAR
        self._before_batch()

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        """Gradients were added."""
        self._after_backward()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """A batch has ended, the optimizer's step included where there is one."""
        self.num_batches += 1
        self._after_batch()


@functools.cache
def _watch_class(package: str) -> Any:
    return type("TrialCallback", (LoopWatch, import_from(package, "callbacks").Callback), {})


_MOST_BATCHES = 64
"""Of a step with manual optimization; whichever optimizer has not stepped in so many is not waited for."""


@final
class StepTimer:
    """Times steps from the end of one to the end of the next: loading, transfer, hooks and optimizer included.

    A *step* is a batch's share of an accumulation window. With manual optimization, where the model decides when an
    optimizer steps, it is one of as many batches as it takes until each that ever steps has stepped. Of a longer window
    two batches are run, and stand for all: one that accumulates and one with the optimizer's step.

    Args:
        trainer: Its fit loop runs within :meth:`timing`, and tells of its batches.
        module: The model.
        accumulation: Micro-batches of an optimizer step, as the training will have them.
        clock: Tells seconds.
        took: Told of each step.
        talked: Told whether collectives took place in a batch.
    """

    def __init__(
        self,
        trainer: Any,
        module: Any,
        *,
        accumulation: int,
        clock: Callable[[], float],
        took: Callable[[float], None],
        talked: Callable[[bool], None],
    ) -> None:
        self._device: torch.device = trainer.strategy.root_device
        self._clock, self._took, self._talked = clock, took, talked
        self._accumulation = accumulation
        self._is_manual = not module.automatic_optimization
        self._optimizers = list(filter(has_step_hooks, trainer.optimizers)) if self._is_manual else []
        self._awaited, self._stepped = set(range(len(self._optimizers))), set[int]()
        self._window: list[float] = []
        self._since: float | None = None
        self._num_collectives = 0

    @property
    def accumulation(self) -> int:
        """Micro-batches of an optimizer step while steps are timed."""
        return min(2, self._accumulation)

    @contextlib.contextmanager
    def timing(self) -> Iterator[None]:
        """The loop runs inside."""
        self._window, self._since = [], None
        self._stepped.clear()
        with contextlib.ExitStack() as stack:
            for number, optimizer in enumerate(self._optimizers):
                noted = functools.partial(self._note_step, number)
                stack.callback(optimizer.register_step_pre_hook(noted).remove)
            yield

    def before_batch(self) -> None:
        """The first batch has nothing before it."""
        if self._since is None:
            synchronize(self._device)
            self._since = self._clock()
        self._num_collectives = num_collectives()

    def after_batch(self) -> None:
        """Count the batch, and the step where it ends one.

        Raises:
            TuningError: With manual optimization no optimizer steps.
        """
        synchronize(self._device)
        assert self._since is not None
        self._window.append(self._clock() - self._since)
        self._talked(num_collectives() != self._num_collectives)
        if self._is_manual:
            if self._have_all_stepped():
                self._end(sum(self._window) / len(self._window))
        elif len(self._window) == self.accumulation:
            first, last = self._window[0], self._window[-1]
            self._end(((self._accumulation - 1) * first + last) / self._accumulation)
        self._since = self._clock()

    def _note_step(self, number: int, *_: Any) -> None:
        self._stepped.add(number)

    def _have_all_stepped(self) -> bool:
        number = len(self._window)
        if number >= _MOST_BATCHES:
            if not self._stepped and self._optimizers:
                raise TuningError(
                    f"training_step() made no optimizer step in {number} batches, so what a step takes is not known:"
                    " step at least that often, or leave the accumulation to Trainer(accumulate_grad_batches=) with"
                    " automatic optimization"
                )
            self._awaited = set(self._stepped)
        return self._awaited <= self._stepped

    def _end(self, seconds: float) -> None:
        self._window = []
        self._stepped.clear()
        self._took(seconds)


class LightningHost:
    """Trains with the fit loop of a Trainer, on this rank.

    Args:
        fit: Its optimizers are made.
        data: Feeds the loop.
        accumulation: Micro-batches of an optimizer step with a size, whatever the Trainer's own number is.

    Attributes:
        memory: The memory plugin of the run; None where it has none.
        decline: Why sizes that may not fit are predicted and not tried; empty where they are tried.
    """

    def __init__(self, fit: Fit, data: TrialData, accumulation: Callable[[int], int]) -> None:
        trainer, allow_oom = fit.trainer, fit.options.allow_oom
        memory = getattr(trainer.strategy, "memory", None)
        self.memory: MemoryPlugin | None = memory if isinstance(memory, MemoryPlugin) and memory.enabled else None
        self._known_kinds = self.memory.step_kinds if self.memory is not None else frozenset[str]()
        self.decline = reason_not_to_run_out(trainer, fit.module, allow_oom)
        self._trainer, self._module, self._package = trainer, fit.module, fit.targets.package
        schedulers = [config.scheduler for config in trainer.strategy.lr_scheduler_configs]
        self._prepared = StateSnapshot(
            (*fit.start.roots, trainer.precision_plugin, *trainer.optimizers, *schedulers), keeps_hooks=True,
            since=fit.start,
        )  # fmt: skip
        self._data, self._clock, self._accumulation = data, fit.clock, accumulation
        self._agreement, self._known_size = fit.agreement, fit.targets.base_size
        self._may_talk = allow_oom is None and fit.agreement.num_ranks > 1
        self._has_talked = False

    @property
    def budget_bytes(self) -> int | None:
        """The budget of the run's plan; without one what the device has, None where that has no limit."""
        if self.memory is not None:
            return self.memory.budget_bytes
        device: torch.device = self._trainer.strategy.root_device
        memory = memory_of(device)
        return memory.free_bytes() + memory.allocated_bytes() if memory is not None else None

    def forget(self) -> None:
        """Drop what the run's plugin has learned of the steps that were tried."""
        if self.memory is not None:
            self.memory.forget(keep=self._known_kinds)

    def train(self, batch_size: int, meter: StepMeter) -> None:
        """Run the fit loop with this size until the meter has enough."""

        def talked(has_talked: bool) -> None:
            if not meter.exchanges:  # its own gradients, that is
                self._has_talked |= has_talked

        timer = StepTimer(
            self._trainer, self._module, accumulation=self._accumulation(batch_size), clock=self._clock,
            took=meter.step_took, talked=talked,
        )  # fmt: skip
        if unfreezes_later(self._trainer):
            self._unfreeze(self._trainer.optimizers[0])
        with self._data.fed(batch_size), timer.timing():
            self._run(timer.accumulation, before_batch=timer.before_batch, after_batch=timer.after_batch)

    def _run(self, accumulation: int, **hooks: Callable[[], None]) -> None:
        """Run the fit loop, again and again where it ends by itself, until something raises or it does nothing."""
        trainer, loop = self._trainer, self._trainer.fit_loop
        watch = _watch_class(self._package)(**hooks)
        call = import_from(self._package, "trainer.call")
        with (
            quiet(trainer, self._module, self._package, watch),
            replaced(trainer, accumulate_grad_batches=accumulation),
        ):
            call._call_lightning_module_hook(trainer, "on_fit_start")  # which comes after the callbacks' own
            num_before = -1
            while watch.num_batches > num_before:
                num_before = watch.num_batches
                loop.run()
                loop.epoch_progress.reset()
                trainer.should_stop = False
                if loop._data_fetcher.done:  # Lightning begins another epoch of it only after the first
                    iter(loop._data_fetcher)

    def _unfreeze(self, optimizer: torch.optim.Optimizer) -> None:
        """Have all parameters trained, since a callback is going to, by this optimizer where they have none."""
        frozen = [each for each in self._module.parameters() if not each.requires_grad and each.is_floating_point()]
        for parameter in frozen:
            parameter.requires_grad_(True)
        known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        added = [parameter for parameter in frozen if id(parameter) not in known]
        if added:
            optimizer.add_param_group({"params": added})

    def pilot(
        self, *, batch_size: int, plan: PilotPlan, num_steps: float, is_late: Callable[[], bool] = lambda: False
    ) -> list[GradientSquares]:
        """Make real optimizer steps and take the squares of the gradients of the measured ones; all is put back."""
        with replaced(self._trainer, accumulate_grad_batches=plan.accumulation):
            pilot = Pilot(
                self._trainer, self._module, plan, micro_size=batch_size, num_ranks=self._agreement.num_ranks,
                num_steps=num_steps, is_late=is_late,
            )  # fmt: skip
            try:
                with self._data.fed(batch_size, is_repeated=False), contextlib.suppress(pilot.Over):
                    self._run(plan.accumulation, after_backward=pilot.after_backward, after_batch=pilot.after_batch)
            finally:
                self.restore()
        return pilot.measured

    def restore(self) -> None:
        """Undo what trials have done to model, data, loops, optimizers, GradScaler and generators."""
        for parameter in self._module.parameters():
            parameter.grad = None
        self._prepared.restore()

    def refusal(self, batch_size: int, trials: Sequence[Trial], predict: Predict) -> str:
        """A size is refused where it may not fit and a rank that runs out of memory would leave others waiting."""
        ran = [trial.batch_size for trial in trials if trial.is_ok]
        if self._may_talk and not self.decline and ran:  # the first one has shown whether ranks talk within a step
            self._may_talk = False
            if not self._agreement.is_true_on_all(not self._has_talked):
                self.decline = "the model has collectives of its own in a training step"
        known_size = max([self._known_size, *ran])
        if batch_size <= known_size or not (self.decline or self._may_talk):
            return ""
        is_safe = self._is_predicted_to_fit(batch_size, predict)
        return "" if self._agreement.is_true_on_all(is_safe) else "predicted not to fit, not tried"

    def _is_predicted_to_fit(self, batch_size: int, predict: Predict) -> bool:
        budget_bytes = self.budget_bytes
        prediction = predict(batch_size)
        if budget_bytes is None or prediction is None:
            return budget_bytes is None
        needed = prediction.floor_bytes if prediction.floor_bytes is not None else prediction.peak_bytes
        return prediction.is_feasible and needed is not None and needed <= _SHARE * budget_bytes

    def is_out_of_memory(self, error: Exception) -> bool:
        """Whether an error says so, by Lightning's rules."""
        return bool(import_from(self._package, "utilities.memory").is_oom_error(error))
