"""Lightning as the host of trials: what runs a batch outside of its fit loop, records, times, and puts back.

Trials of batch sizes: each rank runs and times a few steps, then all agree on what came of them.

A trial begins with the model as it was, takes a batch of its size, warms up, and times steps. Running out of memory
makes it a trial that is not ok; any other error is raised on every rank, once all have finished the trial.

Steps. `quiet` takes the Trainer's callbacks and loggers away and makes `log` do nothing, `TrainingSteps` then runs
what the loop runs for a batch: transfer, forward, backward and, at the end of an accumulation window, the optimizer
with gradient clipping and the GradScaler, through Lightning's own optimization loops and the model's hooks. Under DDP
the wrapper stays out of the way and gradients are not reduced, so a rank that runs out of memory leaves no other
waiting. Nothing here restores: see :mod:`lightning_offload.plugins.snapshot`.

Recording. Under an offload strategy its own memory plugin records, and what it has learned of sizes that are only
tried is dropped afterwards. Under any other strategy a plugin of our own watches a few steps and is taken off before
any is timed; where it cannot (another kind of device, a precision plugin that compiles the step), there is no
recording, and no prediction.

Safety. A rank that runs out of memory leaves its step, and ranks that talk to it within theirs would wait for ever.
Trials do not reduce gradients, so under DDP that is only so where the model or the strategy has collectives of its
own: then what may not fit is predicted and not tried.

States. A trial needs what `configure_optimizers` and `train_dataloader` have set up (the model may keep its
optimizers), but nothing of it may be left when the training begins, which makes them anew.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor
from typing_extensions import override

from lightning_offload.callbacks.tuning.batches import loaders_in
from lightning_offload.errors import BudgetInfeasibleError
from lightning_offload.lightning_packages import import_from
from lightning_offload.plugins.memory import MemoryPlugin
from lightning_offload.plugins.out_of_memory import release_frames
from lightning_offload.strategies.precision import graft, ungraft
from lightning_offload.tuning.predictions import LinePredictor, Recorded
from lightning_offload.tuning.snapshot import RandomStates, StateSnapshot
from lightning_offload.tuning.trial import Prediction, Trial

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer
import gc

from lightning_offload.tuning.ranks import Coordinator, agreed
from lightning_offload.units import format_bytes

_SHARE = 0.9  # of the budget that a prediction may fill
_SHARDED = ("FSDPStrategy", "ModelParallelStrategy")


def reason_not_to_run_out(trainer: Any, module: Any, provoke_oom: bool | None) -> str:
    """Why no trial may run out of memory; empty where one may.

    Args:
        trainer: Its strategy is known.
        module: The model.
        provoke_oom: What the user says of it, if anything.
    """
    if provoke_oom is not None:
        return "" if provoke_oom else "provoke_oom=False"
    name = next((cls.__name__ for cls in type(trainer.strategy).__mro__ if cls.__name__ in _SHARDED), None)
    if name is not None:
        return f"{name} gathers parameters within a step"
    if trainer.world_size > 1 and any(isinstance(part, torch.nn.SyncBatchNorm) for part in module.modules()):
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


def is_safe(
    batch_size: int,
    *,
    known_size: int,
    predict: Callable[[int], Prediction | None],
    trials: Sequence[Trial],
    budget_bytes: int | None,
    num_ranks: int,
) -> bool:
    """Whether a size will surely fit.

    Args:
        batch_size: The size.
        known_size: The largest that the user configured or that has run.
        predict: Predicts a size; the same on every rank.
        trials: Those so far; a line through their peaks is the prediction where there is no other.
        budget_bytes: The budget, None for no limit.
        num_ranks: Devices that train together.
    """
    if batch_size <= known_size or budget_bytes is None:
        return True
    prediction = predict(batch_size) or LinePredictor(trials, budget_bytes, num_ranks)(batch_size)
    needed = prediction.floor_bytes if prediction.floor_bytes is not None else prediction.peak_bytes
    return prediction.is_feasible and needed is not None and needed <= _SHARE * budget_bytes


def roots_of(trainer: Any, module: Any, loaders: Any | None) -> tuple[object, ...]:
    """Whatever a step may change: the model, its data, the loops, and callbacks of the user's own.

    No callback is called in a trial, but hooks of modules that one has registered are.

    Args:
        trainer: At the start of a fit.
        module: The model.
        loaders: Those passed to `fit()`, if any.
    """
    data = [trainer.datamodule] if trainer.datamodule is not None else []
    return (module, trainer.fit_loop, *data, *loaders_in(loaders), *filter(_is_users, trainer.callbacks))


def _is_users(callback: object) -> bool:
    package = type(callback).__module__.partition(".")[0]
    return package not in ("lightning", "pytorch_lightning", "lightning_offload")


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The state that training is to begin from, before Lightning made the optimizers.

    Attributes:
        roots: All that steps may change is below these.
        memento: Of the roots.
        random_states: Of the global generators.
    """

    roots: tuple[object, ...]
    memento: StateSnapshot
    random_states: RandomStates

    @classmethod
    def now(cls, roots: Sequence[object]) -> Start:
        """Record the state as it is."""
        return cls(roots=tuple(roots), memento=StateSnapshot(roots, keeps_hooks=True), random_states=RandomStates.now())

    def restore(self) -> None:
        """Put all of it back."""
        self.memento.restore()
        self.random_states.restore()


@final
class Prepared(StateSnapshot):
    """Which objects there are once the optimizers are made; the contents of tensors are those of the start.

    Args:
        start: The start of the fit, which `restore` goes back to first.
    """

    def __init__(self, start: Start) -> None:
        self._start = start
        super().__init__(start.roots, keeps_hooks=True)

    @override
    def restore(self) -> None:
        """Put the contents of the start into the objects of now."""
        self._start.restore()
        super().restore()

    @override
    def _note_tensor(self, tensor: Tensor, *, is_data: bool) -> None:
        """A second copy of the model is not needed."""


NUM_LEARNING_STEPS = 3
"""Steps of a new shape before its final plan: recorded, verified, measured."""

_NUM_TIMED = 2
_NO_LIMIT = 1 << 50
_log = logging.getLogger(__name__)


class StepRecorder:
    """Lets a memory plugin see steps.

    Args:
        trainer: Its strategy is set up for a fit.
        module: The model.
    """

    def __init__(self, trainer: Any, module: Any) -> None:
        memory = getattr(trainer.strategy, "memory", None)
        self.memory: MemoryPlugin | None = memory if isinstance(memory, MemoryPlugin) and memory.enabled else None
        self._trainer, self._module = trainer, module
        self._known = self.memory.step_kinds if self.memory is not None else frozenset[str]()
        self._is_able = True

    @property
    def budget_bytes(self) -> int | None:
        """The strategy's budget; without one what the device has, None where that has no limit."""
        if self.memory is not None:
            return self.memory.budget_bytes
        device: torch.device = self._trainer.strategy.root_device
        return (
            int(torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_allocated(device))
            if device.type == "cuda"
            else None
        )

    @property
    def policy(self) -> str:
        """Who plans the steps."""
        return self.memory.policy if self.memory is not None else "keep-all"

    def record(self, step: Callable[[], float]) -> Recorded:
        """Run a few steps and return what they showed.

        Args:
            step: Runs one and returns its duration.

        Raises:
            torch.OutOfMemoryError: The device ran out of memory.
            BudgetInfeasibleError: No plan can meet the budget.
        """
        if self.memory is not None:
            return _with_time(self._record(self.memory, step), step)
        if not self._is_able:
            return Recorded(planned=None, peak_bytes=None)
        try:
            with self._watching(step) as memory:
                recorded = self._record(memory, step)
        except (torch.OutOfMemoryError, BudgetInfeasibleError):
            raise
        except Exception as error:
            # the plain steps that follow raise it again where it is the model's and not the recording's
            _log.debug("steps cannot be recorded, the search goes without predictions", exc_info=error)
            self._is_able = False
            return Recorded(planned=None, peak_bytes=None)
        return _with_time(recorded, step)

    def _record(self, memory: MemoryPlugin, step: Callable[[], float]) -> Recorded:
        for _ in range(NUM_LEARNING_STEPS):
            step()
        seconds = step()
        report = memory.report()
        fixed = max(0.0, seconds - (report.measured_step_seconds or seconds))
        return Recorded(planned=report.planned, peak_bytes=report.measured_peak_bytes, fixed_seconds=fixed)

    @contextlib.contextmanager
    def _watching(self, step: Callable[[], float]) -> Iterator[MemoryPlugin]:
        strategy = self._trainer.strategy
        # where memory has no limit a plugin without a budget would have nothing to watch after the first step
        budget = None if strategy.root_device.type == "cuda" else _NO_LIMIT
        memory = MemoryPlugin(budget, policy="keep-all", verify="never")
        memory.attach(self._module, strategy.root_device)
        try:
            step()  # the optimizer makes its state, which the plugin is to know of
            graft(strategy.precision_plugin, memory)
            yield memory
        finally:
            ungraft(strategy.precision_plugin)
            memory.detach()

    def peak_bytes(self) -> int | None:
        """Peak of the steps that ran last, as the strategy's plugin measured it."""
        return self.memory.report().measured_peak_bytes if self.memory is not None else None

    def forget(self) -> None:
        """Drop what the strategy's plugin has learned of the steps that were tried."""
        if self.memory is not None:
            self.memory.forget(keep=self._known)


def _with_time(recorded: Recorded, step: Callable[[], float]) -> Recorded:
    return dataclasses.replace(recorded, step_seconds=min(step() for _ in range(_NUM_TIMED)))


Clock = Callable[[], float]

_LOGGING = ("log", "log_dict", "print")
_PLACES = ("name", "version", "save_dir", "root_dir", "log_dir")
_STARTS = ("on_fit_start", "on_train_start", "on_train_epoch_start")


@contextlib.contextmanager
def quiet(trainer: Any, module: Any, package: str) -> Iterator[None]:
    """Nothing that a step does inside is logged, shown, saved or seen by a callback."""
    callbacks, loggers, model, profiler = trainer.callbacks, trainer.loggers, trainer.strategy.model, trainer.profiler
    trainer.callbacks = []
    trainer.profiler = import_from(package, "profilers").PassThroughProfiler()
    trainer.loggers = [_silent_logger(package)(logger) for logger in loggers]
    for name in _LOGGING:
        object.__setattr__(module, name, _nothing)
    trainer.strategy.model = _unwrapped(model)
    schedulers = [config.scheduler for config in trainer.strategy.lr_scheduler_configs]
    for scheduler in schedulers:
        scheduler.step = _nothing  # under manual optimization the model calls it, and its end would come too soon
    try:
        yield
    finally:
        for scheduler in schedulers:
            vars(scheduler).pop("step", None)
        trainer.strategy.model = model
        trainer.callbacks = callbacks
        trainer.profiler = profiler
        trainer.loggers = loggers
        for name in _LOGGING:
            vars(module).pop(name, None)


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


def _nothing(*_: Any, **__: Any) -> None:
    """What is logged in a trial is not for anyone."""


def _unwrapped(model: Any) -> Any:
    return model.module if isinstance(model, torch.nn.parallel.DistributedDataParallel) else model


class TrainingSteps:
    """Runs and times steps.

    Args:
        trainer: In `quiet`, its strategy set up for a fit.
        module: The model.
        package: The Lightning package of both.
        clock: Tells seconds.
    """

    def __init__(self, trainer: Trainer, module: LightningModule, package: str, clock: Clock) -> None:
        self._trainer: Any = trainer
        self._module: Any = module
        self._package = package
        self._clock = clock
        self.device: torch.device = trainer.strategy.root_device
        num: int = self._trainer.accumulate_grad_batches
        # a number that steps may calculate with, and that no batch of ours is the last one of
        self._num_batches = max(self._trainer.fit_loop.max_batches, num + 1)

    def begin(self) -> None:
        """Run the model's own hooks that come before the first step: steps may need what these set up."""
        call = import_from(self._package, "trainer.call")
        for name in _STARTS:
            call._call_lightning_module_hook(self._trainer, name)

    def seconds(self, batch: Any) -> float:
        """Run a step and return its duration: its share of an accumulation window, optimizer included."""
        num: int = self._trainer.accumulate_grad_batches
        if num == 1:
            return self._timed(batch, is_last=True)
        accumulating = self._timed(batch, is_last=False)
        return ((num - 1) * accumulating + self._timed(batch, is_last=True)) / num

    def _timed(self, batch: Any, *, is_last: bool) -> float:
        self._synchronize()
        begin = self._clock()
        self._run(batch, is_last=is_last)
        self._synchronize()
        seconds: float = self._clock() - begin
        return seconds

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _run(self, batch: Any, *, is_last: bool) -> None:
        trainer = self._trainer
        loop, num = trainer.fit_loop.epoch_loop, trainer.accumulate_grad_batches
        # by this the loop tells whether the optimizer's turn has come
        loop.batch_progress.current.ready = num if is_last else 1
        loop.batch_progress.is_last_batch = False
        trainer.fit_loop.max_batches = self._num_batches
        batch_idx = num - 1 if is_last else 0
        batch = trainer.precision_plugin.convert_input(batch)
        batch = self._module._on_before_batch_transfer(batch, dataloader_idx=0)
        call = import_from(self._package, "trainer.call")
        batch = call._call_strategy_hook(trainer, "batch_to_device", batch, dataloader_idx=0)
        # not the strategy's hook of this name: ours prints the plan of the training's steps there
        call._call_lightning_module_hook(trainer, "on_train_batch_start", batch, batch_idx)
        kwargs = loop._build_kwargs(OrderedDict(), batch, batch_idx)
        if self._module.automatic_optimization:
            output = loop.automatic_optimization.run(trainer.optimizers[0], batch_idx, kwargs)
        else:
            output = loop.manual_optimization.run(kwargs)
        call._call_lightning_module_hook(trainer, "on_train_batch_end", output, batch, batch_idx)

    def drop_gradients(self) -> None:
        """Let go of all gradients."""
        for parameter in self._module.parameters():
            parameter.grad = None


_NO_MEMORY = "out of memory"


class TrialRunner:
    """Runs trials on this rank and agrees on them with the others.

    Args:
        trainer: At the start of a fit, optimizers made.
        module: The model.
        package: The Lightning package of both.
        start: What every trial begins from, but for what has been made since for the optimizers and the loaders.
        make_batch: Makes a batch of a size, on the host.
        set_batch_size: Sets a size where the model keeps it.
        agreement: Between ranks.
        steps_per_trial: Steps that are timed.
        warmup_steps: Steps before them.
        clock: Tells seconds.

    Attributes:
        has_collectives: Whether ranks talk to one another in a recorded step, the optimizer's part included.
    """

    def __init__(
        self,
        trainer: Any,
        module: Any,
        package: str,
        *,
        start: Start,
        make_batch: Callable[[int], Any],
        set_batch_size: Callable[[int], None],
        agreement: Coordinator,
        steps_per_trial: int,
        warmup_steps: int,
        clock: Callable[[], float],
    ) -> None:
        self.recorder = StepRecorder(trainer, module)
        self.has_collectives = False
        self._trainer, self._module, self._package = trainer, module, package
        self._prepared = Prepared(start)
        self._plugin = StateSnapshot([trainer.precision_plugin])
        self._make_batch, self._set_batch_size = make_batch, set_batch_size
        self._agreement = agreement
        self._steps_per_trial, self._warmup_steps = steps_per_trial, warmup_steps
        self._steps = TrainingSteps(trainer, module, package, clock)
        self._recorded: dict[int, Recorded] = {}

    def restore(self) -> None:
        """Undo what all trials have done to model, data, loops, GradScaler and generators."""
        self._steps.drop_gradients()
        self._plugin.restore()
        self._prepared.restore()

    def record(self, batch_size: int) -> Recorded | None:
        """Record a step at a size on every rank; None where a rank has no memory for it."""
        found, _ = self._together(batch_size, self._watched)
        is_ok = self._agreement.is_true_on_all(found is not None)
        if found is not None:
            self._recorded[batch_size] = found
        return found if is_ok else None

    def _watched(self, batch: Any) -> Recorded:
        num_before = num_collectives()
        found = self.recorder.record(lambda: self._steps.seconds(batch))
        self.has_collectives |= found.has_collectives or num_collectives() != num_before
        return found

    def __call__(self, batch_size: int) -> Trial:
        """Run the trial of a size; the same record is returned on every rank."""
        trial, reason = self._together(batch_size, lambda batch: self._timed(batch_size, batch))
        trial = trial or Trial(batch_size=batch_size, is_ok=False, reason=reason)
        return agreed(trial, self._agreement)

    def _together(self, batch_size: int, run: Callable[[Any], Any]) -> tuple[Any, str]:
        """What `run` gives for a batch, or None and why there was no memory for it."""
        found, reason, failure = None, "", None
        try:
            self.restore()
            self._set_batch_size(batch_size)
            with quiet(self._trainer, self._module, self._package):
                self._steps.begin()
                found = run(self._make_batch(batch_size))
        except BudgetInfeasibleError as error:
            reason = f"needs a budget of {format_bytes(error.floor_bytes)}"
        except Exception as error:
            if self._is_out_of_memory(error):
                reason = _NO_MEMORY
            else:
                failure = error
            release_frames(error)
        self._clean_up(has_failed=bool(reason) or failure is not None)
        self._agreement.raise_together(failure, f"the trial of batch size {batch_size}")
        return found, reason

    def _timed(self, batch_size: int, batch: Any) -> Trial:
        device, recorder = self._steps.device, self.recorder
        num_warmup = self._warmup_steps
        if recorder.memory is not None:
            # each size is a new shape of step to the plugin; what it records and verifies is no time to trust
            num_warmup += NUM_LEARNING_STEPS
        elif device.type == "cpu" and batch_size not in self._recorded:
            self._recorded[batch_size] = recorder.record(lambda: self._steps.seconds(batch))
        for _ in range(num_warmup):
            self._steps.seconds(batch)
        retries = _num_retries(device)
        if device.type == "cuda" and recorder.memory is None:
            torch.cuda.reset_peak_memory_stats(device)
        seconds = tuple(self._steps.seconds(batch) for _ in range(self._steps_per_trial))
        peak_bytes = self._peak_bytes(batch_size, device)
        trial = Trial.from_steps(batch_size, seconds, peak_bytes=peak_bytes)
        budget_bytes = recorder.budget_bytes if recorder.memory is not None else None
        reason = ""
        if _num_retries(device) > retries:
            reason = "the allocator had to free its cache to go on: memory is as good as full"
        elif budget_bytes is not None and peak_bytes is not None and peak_bytes > budget_bytes:
            reason = f"peak above the budget of {format_bytes(budget_bytes)}"
        if not reason:
            return trial
        return dataclasses.replace(trial, is_ok=False, samples_per_second=None, reason=reason)

    def _peak_bytes(self, batch_size: int, device: torch.device) -> int | None:
        if self.recorder.memory is not None:
            return self.recorder.peak_bytes()
        if device.type == "cuda":
            return torch.cuda.max_memory_allocated(device)
        recorded = self._recorded.get(batch_size)
        return recorded.peak_bytes if recorded is not None else None

    def _is_out_of_memory(self, error: Exception) -> bool:
        is_oom_error = import_from(self._package, "utilities.memory").is_oom_error
        return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or bool(is_oom_error(error))

    def _clean_up(self, *, has_failed: bool) -> None:
        self._steps.drop_gradients()
        is_cuda = self._steps.device.type == "cuda"
        if has_failed or is_cuda:
            gc.collect()
        if is_cuda:
            torch.cuda.empty_cache()  # so that a trial's memory is not that of the one before it


def _num_retries(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    return int(torch.cuda.memory_stats(device).get("num_alloc_retries", 0))
