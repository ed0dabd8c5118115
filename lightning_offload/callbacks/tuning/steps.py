"""Runs training steps of a LightningModule outside of Lightning's fit loop.

`quiet` takes the Trainer's callbacks and loggers away and makes `log` do nothing, `TrainingSteps` then runs what the
loop runs for a batch: transfer, forward, backward and, at the end of an accumulation window, the optimizer with
gradient clipping and the GradScaler, through Lightning's own optimization loops and the model's hooks. Under DDP the
wrapper stays out of the way and gradients are not reduced, so a rank that runs out of memory leaves no other waiting.
Nothing here restores: see :mod:`lightning_offload.plugins.snapshot`.
"""

from __future__ import annotations

import contextlib
import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from lightning_offload.lightning_packages import import_from

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

__all__ = ["Clock", "TrainingSteps", "quiet"]

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
