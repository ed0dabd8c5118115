"""`EfficientBatchSizeFinder`: tunes when a fit begins, or in a fit that ends as soon as the tuning is done."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from typing_extensions import override

from lightning_offload.callbacks.tuning.length import StepLimits
from lightning_offload.callbacks.tuning.options import (
    AdvancedTuning,
    FinderOptions,
    checked_folder,
    misconfiguration,
)
from lightning_offload.callbacks.tuning.result import TuningResult, show, tell_kept
from lightning_offload.callbacks.tuning.session import Session
from lightning_offload.callbacks.tuning.targets import (
    Fit,
    find_targets,
    forget_remade,
    mark,
    rate_to_set,
    tuning_of,
    warn_of_other_batch,
)
from lightning_offload.callbacks.tuning.trainer_facts import replaced, unfreezes_later
from lightning_offload.callbacks.tuning.trials import roots_of
from lightning_offload.errors import TuningError
from lightning_offload.lightning_packages import build_class, import_from, package_for, rank_zero
from lightning_offload.tuning.learning_rate import Warmup, default_warmup_steps, scale_groups
from lightning_offload.tuning.ranks import Coordinator, GlooCoordinator
from lightning_offload.tuning.snapshot import RandomStates, StateSnapshot

if TYPE_CHECKING:
    from lightning.pytorch import LightningDataModule, LightningModule, Trainer
    from lightning.pytorch.callbacks import BatchSizeFinder as _FinderBase
else:
    _FinderBase = object  # the real base comes from the package in use, see build_finder


_UNSUPPORTED = ("DeepSpeedStrategy", "XLAStrategy", "SingleDeviceXLAStrategy")


class EfficientBatchSizeFinderMixin(_FinderBase):
    """Finds the efficiency-optimal batch size when a fit begins, sets it with its learning rate, and trains on with it.

    Real training steps are timed at a few sizes, chosen by a performance model of the step; the smallest size is taken
    that is within 3% of the best that fits, by `objective`. Under an offload strategy, steps run under its
    memory plan. Afterwards everything is as if the fit had been started with the found values, or as it was where the
    gain is not sure. `result` tells all.

    Args:
        batch_arg_name: Name of the batch size in the model, its data, or their hparams; dots lead into nested ones.
        lr_arg_name: Name of the learning rate in the same places; None to scale the optimizer's groups as they are.
        objective: What is to be best. "keep_effective_batch": throughput, while an optimizer step sees as many samples
            as configured (a larger micro-batch, less accumulation). "goodput": throughput by what a sample is worth in
            a larger batch, from the gradient noise scale, which a pilot of real steps measures; the size changes only
            where the run surely ends 1.05 times as early. "throughput": samples per second. "auto" keeps the effective
            batch where that leaves room for a larger micro-batch, and is for goodput otherwise.
        min_val: Smallest batch size that may be chosen.
        max_val: Largest one; by default what a rank has samples for.
        lr_scaling: How the learning rate follows the effective batch (size x ranks x accumulation): "linear", "sqrt",
            "none", or "auto", which is linear for SGD and the square root for Adam and its like.
        max_seconds: Time after which no further trial begins; by default 2% of what the run is estimated to take,
            unless `tune` was called. `float("inf")` for no limit.
        plot_dir: Folder for `batch_size.html` and `batch_size.png`, throughput and peak against batch size.
        on_failure: What to do where nothing can be tuned, or tuning fails: "keep" what is configured, which one warning
            tells, or "raise", which ends the fit. `tune` always raises.
        advanced: What few set, an `AdvancedTuning` or a mapping of its fields: `{"tolerance": 0.05}`.

    Raises:
        TuningError: A keyword is not possible. With `on_failure="raise"` also, when the fit begins and before training:
            there is no such attribute, no optimizer, no length where one is needed, or no size that fits.
    """

    result: TuningResult | None

    def __init__(
        self,
        batch_arg_name: str = "batch_size",
        lr_arg_name: str | None = "lr",
        objective: Literal["auto", "keep_effective_batch", "goodput", "throughput"] = "auto",
        min_val: int = 1,
        max_val: int | None = None,
        lr_scaling: Literal["auto", "linear", "sqrt", "none"] = "auto",
        max_seconds: float | None = None,
        plot_dir: str | os.PathLike[str] | None = None,
        on_failure: Literal["keep", "raise"] = "keep",
        advanced: AdvancedTuning | Mapping[str, Any] | None = None,
    ) -> None:
        others = AdvancedTuning.of(advanced)
        super().__init__(batch_arg_name=batch_arg_name, steps_per_trial=others.steps_per_trial)
        self._options = FinderOptions(
            batch_arg_name=batch_arg_name, lr_arg_name=lr_arg_name, objective=objective, min_val=min_val,
            max_val=max_val, lr_scaling=lr_scaling, max_seconds=max_seconds, on_failure=on_failure,
            **dataclasses.asdict(others),
        )  # fmt: skip
        self._plot_dir = None if plot_dir is None else checked_folder(plot_dir)
        self._clock: Callable[[], float] = time.perf_counter
        self.result = None
        self._is_restored = False
        self._session: Session | None = None
        self._warmup: Warmup | None = None
        self._warmup_state: Any = None
        self._limits = StepLimits()
        self._num_trainable: int | None = None

    # ---- the fit

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str | None = None) -> None:
        """Checks what can be checked, and watches for the optimizers to be made."""
        if stage != "fit" or self._is_skipped(trainer):
            return
        self._session = None
        for cls in type(trainer.strategy).__mro__:
            if cls.__name__ in _UNSUPPORTED:
                error = misconfiguration(trainer, f"EfficientBatchSizeFinder does not support {cls.__name__}: use DDP")
                if self._options.on_failure == "raise" or self._early_exit:
                    raise error
                self.result = None
                tell_kept(package_for(trainer), error)
                return
        original = trainer.strategy.setup_optimizers

        def setup_optimizers(trainer: Trainer) -> None:
            vars(trainer.strategy).pop("setup_optimizers", None)  # once
            self._before_optimizers(trainer, pl_module)
            original(trainer)
            if self.result is not None and self._session is None:
                strategy: Any = trainer.strategy
                schedulers = [config.scheduler for config in strategy.lr_scheduler_configs]
                scale_groups(strategy.optimizers, schedulers, self.result.scaled_groups, self.result.lr_factor)

        trainer.strategy.setup_optimizers = setup_optimizers  # type: ignore[method-assign]

    def _is_skipped(self, trainer: Trainer) -> bool:
        if trainer.fast_dev_run:  # type: ignore[attr-defined]  # set by one of its connectors
            package = package_for(trainer)
            rank_zero(package, "info", "EfficientBatchSizeFinder is skipped: fast_dev_run is on")
            return True
        return False

    def _before_optimizers(self, trainer: Trainer, module: LightningModule) -> None:
        package = package_for(trainer)
        is_known = self.result is not None and (self._is_restored or tuning_of(module) == self.result)
        start = StateSnapshot(())  # the random states
        try:
            if not is_known:
                source = trainer.fit_loop._data_source
                loaders = None if source.is_module() else source.instance
                start = StateSnapshot(roots_of(trainer, module, loaders), keeps_hooks=True)
            targets = find_targets(trainer, module, package, self._options)
            start.restore()  # what is asked for loaders may draw random numbers
        except Exception as error:
            start.restore()
            is_raised = self._options.on_failure == "raise" or self._early_exit
            if is_raised and isinstance(error, TuningError):
                raise misconfiguration(trainer, str(error)) from None
            if is_raised or (trainer.world_size > 1 and not isinstance(error, TuningError)):
                raise
            self.result = None  # of another model, or of this one before it was changed
            tell_kept(package, error)
            return
        if self.result is not None and is_known:
            self._limits.set(trainer, self.result)
            warn_of_other_batch(trainer, package, self.result)
            rate = self.result.lr if self._is_restored else rate_to_set(module, targets, self.result)
            if rate is None:
                rank_zero(package, "info", f"the learning rate {targets.base_rate!r}, set since the tuning, is kept")
            targets.apply(trainer, self.result.batch_size, rate)
            self._is_restored = False
            mark(module, self.result, self._options)
            return
        self.result, self._warmup_state = None, None  # of another model
        fit = Fit(
            trainer=trainer, module=module, options=self._options, targets=targets, start=start,
            agreement=Coordinator() if trainer.world_size == 1 else GlooCoordinator(), clock=self._clock,
        )  # fmt: skip
        is_visible = trainer.is_global_zero and trainer.progress_bar_callback is not None
        self._session = Session(fit, self._limits, is_visible=is_visible, is_alone=self._early_exit)

    @override
    def scale_batch_size(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Runs the tuning that `setup` has prepared, when the fit begins; does nothing where there is none to run."""
        session, self._session = self._session, None
        if session is not None:
            try:
                self.result = session.run()
            except TuningError as error:
                raise misconfiguration(trainer, str(error)) from error.__cause__
            if self.result is None:
                return
            self.optimal_batch_size = self.result.batch_size
            mark(pl_module, self.result, self._options)
            self._num_trainable = None if unfreezes_later(trainer) else _num_trainable(pl_module)
            show(self.result, trainer, package_for(trainer), self._plot_dir)
        if self._early_exit:
            package = package_for(trainer)
            raise import_from(package, "utilities.exceptions")._TunerExitException

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begins, or goes on with, the warm-up of the learning rate."""
        result = self.result
        if result is None or result.lr_factor <= 1:
            return
        num_steps = self._options.lr_warmup_steps
        if num_steps is None:
            length = trainer.estimated_stepping_batches
            num_steps = default_warmup_steps(length if length > 0 else math.inf)  # -1 of a stream without an end
        if not num_steps:
            return
        self._warmup = Warmup(num_steps, result.lr_factor)
        if self._warmup_state is not None:
            self._warmup.load_state_dict(self._warmup_state)
        self._warmup.attach(trainer.optimizers)
        self.result = dataclasses.replace(result, warmup_steps=self._warmup.num_steps)
        mark(pl_module, self.result, self._options)

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Warns where parameters are trained that were frozen in trials."""
        if self._num_trainable is not None and _num_trainable(pl_module) > self._num_trainable:
            more, self._num_trainable = _num_trainable(pl_module) - self._num_trainable, None
            rank_zero(
                package_for(trainer),
                "warn",
                f"{more} parameters are trained from epoch {trainer.current_epoch} on that were frozen when the batch"
                " size was tuned, so more memory may be needed than was measured: use a BaseFinetuning callback, which"
                " trials take into account, or set max_val",
            )

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Takes all hooks off."""
        vars(trainer.strategy).pop("setup_optimizers", None)
        forget_remade(trainer)
        self._session = None
        self._limits.put_back()
        if self._warmup is not None:
            self._warmup_state = self._warmup.state_dict()
            self._warmup.remove()
            self._warmup = None

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Takes all hooks off."""
        self.teardown(trainer, pl_module, "fit")

    # ---- before a fit

    def tune(
        self,
        trainer: Trainer,
        model: LightningModule,
        datamodule: LightningDataModule | None = None,
        train_dataloaders: Any = None,
    ) -> TuningResult:
        """Finds the batch size without training: the model and its data have the found values afterwards.

        A later `fit` of the same model with this callback keeps the result and does not tune again; dataloaders that
        are passed to it are given the size there.

        Args:
            trainer: As it will be used for the fit.
            model: The model.
            datamodule: Its data, or `None`.
            train_dataloaders: In its place, what would be passed to `fit`.

        Raises:
            TuningError: As for the finder itself.
        """
        self.result = None
        states, progress_bar = RandomStates.now(), trainer.progress_bar_callback
        callbacks = [self, *([progress_bar] if progress_bar is not None else [])]
        self._early_exit = True
        try:
            with replaced(trainer, callbacks=callbacks, loggers=[]):
                trainer.fit(model, train_dataloaders, datamodule=datamodule)
        finally:
            self._early_exit = False
            states.restore()
        if self.result is None:
            raise misconfiguration(trainer, "nothing was tuned: fast_dev_run is on, or the run was interrupted")
        return self.result

    # ---- checkpoints

    @override
    def state_dict(self) -> dict[str, Any]:
        """The result, and how far the warm-up is."""
        if self.result is None:
            return {}
        warmup = self._warmup.state_dict() if self._warmup is not None else self._warmup_state
        return {"result": self.result.state_dict(), "warmup": warmup}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes a result over: the fit that begins is not tuned, and nothing is scaled again."""
        if not state_dict:
            return
        self.result = TuningResult.from_state_dict(state_dict["result"])
        self.optimal_batch_size = self.result.batch_size
        self._warmup_state = state_dict.get("warmup")
        self._is_restored = True


def _num_trainable(module: LightningModule) -> int:
    return sum(parameter.requires_grad for parameter in module.parameters())


@functools.cache
def build_finder(package: str) -> type[EfficientBatchSizeFinderMixin]:
    """Builds the class `EfficientBatchSizeFinder` for the Lightning package `package`, importing it if need be."""
    base = import_from(package, "callbacks").BatchSizeFinder
    return build_class(EfficientBatchSizeFinderMixin, "EfficientBatchSizeFinder", base)
