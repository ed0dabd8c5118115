"""Lightning as the host of trials: what runs a batch outside of its fit loop, records, and puts back.

Steps. `quiet` takes the Trainer's callbacks and loggers away and makes `log` do nothing, `TrainingSteps` then runs
what the loop runs for a batch: transfer, forward, backward and, at the end of an accumulation window, the optimizer
with gradient clipping and the GradScaler, through Lightning's own optimization loops and the model's hooks.

Recording. Under an offload strategy its own memory plugin records, and what it has learned of sizes that are only
tried is dropped afterwards. Under any other strategy a plugin of our own watches a few steps and is taken off before
any is timed; where it cannot (another kind of device, a precision plugin that compiles the step), there is no
recording, and no prediction.

Safety. A rank that runs out of memory leaves its step, and ranks that talk to it within theirs would wait for ever.
Trials exchange no gradients, so under DDP that is only so where the model or the strategy has collectives of its own:
then what may not fit is predicted and not tried.

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

from lightning_offload.accelerators import kind_of, memory_of, synchronize
from lightning_offload.callbacks.tuning.accumulation import accumulating
from lightning_offload.callbacks.tuning.batches import loaders_in
from lightning_offload.callbacks.tuning.coupling import is_batch_norm_shared, sharding_of
from lightning_offload.callbacks.tuning.freezing import thaw
from lightning_offload.callbacks.tuning.pilot import GradientWatch, PilotPlan, ScheduleSteps
from lightning_offload.callbacks.tuning.turns import OptimizerTurns
from lightning_offload.errors import BudgetInfeasibleError
from lightning_offload.lightning_packages import import_from
from lightning_offload.plugins.memory import MemoryPlugin
from lightning_offload.plugins.out_of_memory import release_frames
from lightning_offload.strategies.precision import graft, ungraft
from lightning_offload.tuning.noise_scale import MIN_STEPS, GradientSquares
from lightning_offload.tuning.predictions import LinePredictor
from lightning_offload.tuning.ranks import Coordinator
from lightning_offload.tuning.runner import Seen, StepMeter
from lightning_offload.tuning.snapshot import RandomStates, StateSnapshot
from lightning_offload.tuning.trial import Predict, Prediction, Trial

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

_SHARE = 0.9  # of the budget that a prediction may fill


def reason_not_to_run_out(trainer: Any, module: Any, provoke_oom: bool | None) -> str:
    """Why no trial may run out of memory; empty where one may.

    Args:
        trainer: Its strategy is known.
        module: The model.
        provoke_oom: What the user says of it, if anything.
    """
    if provoke_oom is not None:
        return "" if provoke_oom else "provoke_oom=False"
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
        memory = memory_of(device)
        return memory.free_bytes() + memory.allocated_bytes() if memory is not None else None

    def record(self, step: Callable[[], float]) -> Seen | None:
        """Run a few steps under a plugin of our own and tell what they showed; None where none can watch.

        Args:
            step: Runs one and returns its duration.

        Raises:
            torch.OutOfMemoryError: The device ran out of memory.
            BudgetInfeasibleError: No plan can meet the budget.
        """
        if not self._is_able:
            return None
        try:
            with self._watching(step) as memory:
                for _ in range(NUM_LEARNING_STEPS):
                    step()
                seen = Seen.of(memory, step())
        except (torch.OutOfMemoryError, BudgetInfeasibleError):
            raise
        except Exception as error:
            # the plain steps that follow raise it again where it is the model's and not the recording's
            _log.debug("steps cannot be recorded, the search goes without predictions", exc_info=error)
            self._is_able = False
            return None
        return dataclasses.replace(seen, budget_bytes=self.budget_bytes)

    @contextlib.contextmanager
    def _watching(self, step: Callable[[], float]) -> Iterator[MemoryPlugin]:
        strategy = self._trainer.strategy
        # where memory has no limit a plugin without a budget would have nothing to watch after the first step
        budget = None if kind_of(strategy.root_device).counts_memory else _NO_LIMIT
        memory = MemoryPlugin(budget, policy="keep-all", verify="never")
        memory.attach(self._module, strategy.root_device)
        memory.allow_unserved()
        try:
            step()  # the optimizer makes its state, which the plugin is to know of
            graft(strategy.precision_plugin, memory)
            yield memory
        finally:
            ungraft(strategy.precision_plugin)
            memory.detach()

    def forget(self) -> None:
        """Drop what the strategy's plugin has learned of the steps that were tried."""
        if self.memory is not None:
            self.memory.forget(keep=self._known)


Clock = Callable[[], float]

_LOGGING = ("log", "log_dict", "print")
_PLACES = ("name", "version", "save_dir", "root_dir", "log_dir")
_STARTS = ("on_fit_start", "on_train_start", "on_train_epoch_start")


@contextlib.contextmanager
def quiet(trainer: Any, module: Any, package: str) -> Iterator[None]:
    """Nothing that a step does inside is logged, shown, saved or seen by a callback."""
    callbacks, loggers, profiler = trainer.callbacks, trainer.loggers, trainer.profiler
    trainer.callbacks = []
    trainer.profiler = import_from(package, "profilers").PassThroughProfiler()
    trainer.loggers = [_silent_logger(package)(logger) for logger in loggers]
    for name in _LOGGING:
        object.__setattr__(module, name, _nothing)
    schedulers = [config.scheduler for config in trainer.strategy.lr_scheduler_configs]
    for scheduler in schedulers:
        scheduler.step = _nothing  # under manual optimization the model calls it, and its end would come too soon
    try:
        yield
    finally:
        for scheduler in schedulers:
            vars(scheduler).pop("step", None)
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


class TrainingSteps:
    """Runs and times steps.

    Args:
        trainer: In `quiet`, its strategy set up for a fit.
        module: The model.
        package: The Lightning package of both.
        clock: Tells seconds.

    Attributes:
        device: That of the model.
        num_batches: Micro-batches that the last step stands for: an accumulation window, or as many as a model with
            manual optimization has taken until each of its optimizers had stepped.
    """

    def __init__(self, trainer: Trainer, module: LightningModule, package: str, clock: Clock) -> None:
        self._trainer: Any = trainer
        self._module: Any = module
        self._package = package
        self._clock = clock
        self.device: torch.device = trainer.strategy.root_device
        self.num_batches = 1
        self._batch_idx = 0
        self._turns = OptimizerTurns(trainer.optimizers)

    def begin(self) -> None:
        """Run the model's own hooks that come before the first step: steps may need what these set up."""
        self._batch_idx = 0
        call = import_from(self._package, "trainer.call")
        for name in _STARTS:
            call._call_lightning_module_hook(self._trainer, name)

    def seconds(self, batch: Any) -> float:
        """Run a step and return its duration: a batch's share of an accumulation window, optimizer included.

        Raises:
            TuningError: With manual optimization no optimizer steps.
        """
        if not self._module.automatic_optimization:
            return self._manual_seconds(batch)
        num = self.num_batches = int(self._trainer.accumulate_grad_batches)
        if num == 1:
            return self._timed(batch, is_last=True)
        accumulating = self._timed(batch, is_last=False)
        self._batch_idx += num - 2  # those that take as long as the first
        return ((num - 1) * accumulating + self._timed(batch, is_last=True)) / num

    def _manual_seconds(self, batch: Any) -> float:
        """Run batches until all optimizers have had their turn; the share of one."""
        seconds, self.num_batches = 0.0, 0
        with self._turns.watched():
            while not self._turns.are_over(self.num_batches):
                seconds += self._timed(batch, is_last=True)
                self.num_batches += 1
        return seconds / self.num_batches

    def _timed(self, batch: Any, *, is_last: bool) -> float:
        synchronize(self.device)
        begin = self._clock()
        self.run(batch, is_last=is_last)
        synchronize(self.device)
        seconds: float = self._clock() - begin
        return seconds

    def run(self, batch: Any, *, is_last: bool) -> None:
        """Run a micro-batch; the last of an accumulation window with the optimizer's step."""
        trainer = self._trainer
        loop, num = trainer.fit_loop.epoch_loop, trainer.accumulate_grad_batches
        # by this the loop tells whether the optimizer's turn has come
        loop.batch_progress.current.ready = num if is_last else 1
        loop.batch_progress.is_last_batch = False
        batch_idx, self._batch_idx = self._batch_idx, self._batch_idx + 1
        # a number that steps may calculate with, and that no batch of ours is the last one of
        trainer.fit_loop.max_batches = max(trainer.fit_loop.max_batches, batch_idx + num + 1)
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

    def begin_window(self, num_micro: int) -> None:
        """Let the next batch be the first of an accumulation window: by its number the loop drops gradients there."""
        self._batch_idx += -self._batch_idx % num_micro

    def drop_gradients(self) -> None:
        """Let go of all gradients."""
        for parameter in self._module.parameters():
            parameter.grad = None


class LightningHost:
    """Trains with the steps of a Trainer, on this rank.

    Args:
        trainer: At the start of a fit, optimizers made.
        module: The model.
        package: The Lightning package of both.
        start: What every trial begins from, but for what has been made since for the optimizers and the loaders.
        make_batch: Makes a batch of a size, on the host.
        set_batch_size: Sets a size where the model keeps it.
        agreement: Between ranks.
        known_size: The largest size that the user is known to train with.
        provoke_oom: What the user says of trials that run out of memory, if anything.
        will_thaw: Whether a callback is going to train parameters that are frozen now.
        accumulation: Micro-batches of an optimizer step with a size, whatever the Trainer's own number is.
        clock: Tells seconds.

    Attributes:
        recorder: Shows steps to a memory plugin.
        decline: Why sizes that may not fit are predicted and not tried; empty where they are tried.
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
        known_size: int,
        provoke_oom: bool | None,
        will_thaw: bool,
        accumulation: Callable[[int], int],
        clock: Clock,
    ) -> None:
        self._will_thaw = will_thaw
        self._accumulation = accumulation
        self.recorder = StepRecorder(trainer, module)
        self.decline = reason_not_to_run_out(trainer, module, provoke_oom)
        self._trainer, self._module, self._package = trainer, module, package
        self._prepared = Prepared(start)
        self._plugin = StateSnapshot([trainer.precision_plugin])
        self._make_batch, self._set_batch_size = make_batch, set_batch_size
        self._agreement, self._known_size = agreement, known_size
        self._steps = TrainingSteps(trainer, module, package, clock)
        self._may_talk = provoke_oom is None and agreement.num_ranks > 1
        self._has_talked = False

    @property
    def is_to_be_watched(self) -> bool:
        """Whether a size that is known has to show first that ranks do not talk to one another within a step."""
        return self._may_talk and not self.decline

    def train(self, batch_size: int, meter: StepMeter) -> None:
        """Run steps of this size until the meter has enough."""
        with self._trying(batch_size):
            batch = self._make_batch(batch_size)
            is_alone = self.recorder.memory is None  # no plugin of the strategy's sees the steps
            if is_alone and (meter.is_recorded or not kind_of(self._steps.device).counts_memory):
                seen = self.recorder.record(lambda: self._step(batch))
                if seen is not None:
                    self._has_talked |= seen.recorded.has_collectives
                    meter.note(seen)
            while True:
                num_before = meter.withheld.num_exchanges
                seconds = self._step(batch)
                num_exchanges = (meter.withheld.num_exchanges - num_before) / self._steps.num_batches
                meter.step_took(seconds, num_exchanges=num_exchanges)

    def first_steps(self, batch_size: int) -> float | None:
        """What steps of this size take, the first one aside; all is put back.

        Returns:
            Seconds of the faster of two; None where a plugin of the strategy's sees steps, whose first ones it records,
            and where they fail: the trial that follows tells why.
        """
        if self.recorder.memory is not None:
            return None
        try:
            with self._trying(batch_size):
                batch = self._make_batch(batch_size)
                self._step(batch)
                return min(self._step(batch) for _ in range(2))
        except Exception as error:
            _log.debug("the first steps failed", exc_info=error)
            release_frames(error)
            return None
        finally:
            self.restore()

    @contextlib.contextmanager
    def _trying(self, batch_size: int) -> Iterator[None]:
        self._set_batch_size(batch_size)
        groups = [(optimizer, list(optimizer.param_groups)) for optimizer in self._trainer.optimizers]
        if self._will_thaw:
            thaw(self._module, self._trainer.optimizers[0])
        try:
            with (
                quiet(self._trainer, self._module, self._package),
                accumulating(self._trainer, self._accumulation(batch_size)),
            ):
                self._steps.begin()
                yield
        finally:
            for optimizer, before in groups:
                optimizer.param_groups[:] = before  # schedules know no others

    def pilot(
        self,
        batches: Iterator[Any],
        *,
        batch_size: int,
        plan: PilotPlan,
        num_steps: float,
        is_late: Callable[[], bool] = lambda: False,
    ) -> tuple[list[GradientSquares], list[GradientSquares]]:
        """Make real optimizer steps and take the squares of their gradients; all is put back.

        Args:
            batches: All different, on the host.
            batch_size: Samples of one.
            plan: The steps.
            num_steps: Those of the run, at whose end its schedules end; 0 where they are not to be stepped.
            is_late: Whether no step more is to be made than a measurement needs.

        Returns:
            Those of the first steps, and those of the measured ones.
        """
        phases = (
            (plan.num_first, plan.accumulation, True),
            (plan.num_lead, plan.accumulation, False),
            (plan.num_measured, plan.num_micro, True),
        )
        found = []
        schedules = ScheduleSteps(self._trainer, num_steps)
        try:
            with quiet(self._trainer, self._module, self._package), schedules.stepping():
                self._steps.begin()
                for number, num_micro, is_watched in phases:
                    watch = GradientWatch(
                        self._trainer, self._module, num_micro=num_micro, micro_size=batch_size,
                        num_ranks=self._agreement.num_ranks,
                    )  # fmt: skip
                    watching = watch.watching() if is_watched else contextlib.nullcontext()
                    self._steps.begin_window(num_micro)
                    with accumulating(self._trainer, num_micro), watching:
                        for made in range(number):
                            if made >= MIN_STEPS and is_late():
                                break
                            for micro in range(num_micro):
                                self._steps.run(next(batches), is_last=micro == num_micro - 1)
                            schedules.made_step(plan.accumulation)
                    found.append(watch.steps)
        finally:
            self.restore()
        return found[0], found[-1]

    def _step(self, batch: Any) -> float:
        num_before = num_collectives()
        seconds = self._steps.seconds(batch)
        self._has_talked |= num_collectives() != num_before
        return seconds

    def restore(self) -> None:
        """Undo what trials have done to model, data, loops, GradScaler and generators."""
        self._steps.drop_gradients()
        self._plugin.restore()
        self._prepared.restore()

    def refusal(self, batch_size: int, trials: Sequence[Trial], predict: Predict) -> str:
        """A size is refused where it may not fit and a rank that runs out of memory would leave others waiting."""
        ran = [trial.batch_size for trial in trials if trial.is_ok]
        if self.is_to_be_watched and ran:
            memory = self.recorder.memory
            if memory is not None:
                memory.plan()
            planned = memory.report(of_last=True).planned if memory is not None else None
            self._has_talked |= planned is not None and planned.graph.has_collectives
            self._may_talk = False
            if not self._agreement.is_true_on_all(not self._has_talked):
                self.decline = "the model has collectives of its own in a training step"
        known_size = max([self._known_size, *ran])
        if batch_size <= known_size or not (self.decline or self._may_talk):
            return ""
        safe = is_safe(
            batch_size,
            known_size=known_size,
            predict=predict,
            trials=trials,
            budget_bytes=self.recorder.budget_bytes,
            num_ranks=self._agreement.num_ranks,
        )
        return "" if self._agreement.is_true_on_all(safe) else "predicted not to fit, not tried"

    def is_out_of_memory(self, error: Exception) -> bool:
        """Whether an error says so, by Lightning's rules."""
        return bool(import_from(self._package, "utilities.memory").is_oom_error(error))
