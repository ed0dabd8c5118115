"""One tuning of one fit: checks, records, searches, restores, and sets what was found.

A session begins right before Lightning makes the optimizers, where it notes the state that training is to begin from,
and runs when they are made and the model is on its device. At the end the state is put back, the values are set, and
the optimizers are made once more, under the random state and on the dataloaders that an untuned run would have.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from lightning_offload.callbacks.tuning.accumulation import accumulation_of, accumulation_schedule
from lightning_offload.callbacks.tuning.freezing import will_thaw
from lightning_offload.callbacks.tuning.host import NUM_LEARNING_STEPS, LightningHost, Start, roots_of
from lightning_offload.callbacks.tuning.length import StepLimits, check_lengths, schedule_lengths
from lightning_offload.callbacks.tuning.options import FinderOptions
from lightning_offload.callbacks.tuning.rates import Place, base_rates, first_rate, scale_groups, stragglers
from lightning_offload.callbacks.tuning.result import SearchProgress, TuningResult
from lightning_offload.callbacks.tuning.sampling import Bounds, Sampler, end_workers
from lightning_offload.callbacks.tuning.targets import Targets, batch_of_rate
from lightning_offload.errors import TuningError
from lightning_offload.lightning_packages import rank_zero
from lightning_offload.tuning.gates import Choice, sure_choice
from lightning_offload.tuning.learning_rate import (
    check_rate,
    effective_batch,
    has_step_hooks,
    learning_rate_factor,
    resolved_rule,
    rule_warning,
)
from lightning_offload.tuning.predictions import Predictions
from lightning_offload.tuning.ranks import Coordinator, GlooCoordinator, SingleProcess
from lightning_offload.tuning.runner import TrialRunner, TrialSettings
from lightning_offload.tuning.scaling import Scaling
from lightning_offload.tuning.search import SearchResult

__all__ = ["Session"]

_TRAINER_STATE = ("val_check_batch", "should_stop", "_train_start_time", "_last_val_time")


class Session:
    """One tuning at the start of a fit: what is tried, in which order, and what is set in the end.

    Args:
        options: What the user asked for.
        targets: What is to be set.
        trainer: At the start of a fit.
        module: The model.
        limits: The Trainer's limits in steps, which are set for what is found.
        clock: Tells seconds.
        is_visible: Whether this rank shows progress.
    """

    def __init__(
        self,
        options: FinderOptions,
        targets: Targets,
        trainer: Any,
        module: Any,
        *,
        limits: StepLimits,
        clock: Callable[[], float],
        is_visible: bool,
    ) -> None:
        self._limits = limits
        self._num_steps = math.inf
        self._options, self._targets = options, targets
        self._trainer, self._module = trainer, module
        self._clock, self._is_visible = clock, is_visible
        self._agreement: Coordinator = SingleProcess()
        self._start = Start.now(roots_of(trainer, module, targets.loaders))
        self._trainer_state = {name: getattr(trainer, name) for name in _TRAINER_STATE if hasattr(trainer, name)}

    def run(self) -> TuningResult:
        """Tune; whatever happens, the state is as it was, and the model is set as found or as it was.

        Raises:
            TuningError: There is nothing to tune, or no size fits.
        """
        result: TuningResult | None = None
        before = base_rates(self._trainer.optimizers)
        lengths = schedule_lengths(self._trainer.strategy.lr_scheduler_configs)
        try:
            with self._agreeing():
                result = self._tuned()
        finally:
            # after an error too: what a user does next begins from a model that was not trained
            self._restore()
            self._targets.apply(
                self._trainer,
                result.batch_size if result is not None else self._targets.base_size,
                result.lr if result is not None else self._targets.base_rate,
            )
        try:
            told = self._limits.scale(self._trainer, result.batch_ratio, result.first_step)
            places = self._make_optimizers(before, result.lr_factor)
            check_lengths(
                lengths,
                schedule_lengths(self._trainer.strategy.lr_scheduler_configs),
                num_before=self._num_steps,
                num_after=math.ceil(self._num_steps / result.batch_ratio)
                if math.isfinite(self._num_steps)
                else math.inf,
            )
        except BaseException:
            self._limits.put_back(self._trainer)
            self._restore()
            self._targets.apply(self._trainer, self._targets.base_size, self._targets.base_rate)
            raise
        note = " ".join(filter(None, (result.note, f"{told}." if told else "")))
        return dataclasses.replace(result, scaled_groups=places, note=note)

    @contextlib.contextmanager
    def _agreeing(self) -> Iterator[None]:
        if self._trainer.world_size == 1:
            yield
            return
        with GlooCoordinator() as self._agreement:
            yield

    # ---- searching

    def _tuned(self) -> TuningResult:
        options = self._options
        self._check_optimizers()
        sampler = self._agreement.together(
            lambda: Sampler(options, self._targets, self._trainer), "reading a batch of the train dataloader"
        )
        self._num_steps = _num_steps(self._trainer)
        bounds = sampler.bounds(self._module, self._agreement)
        host = LightningHost(
            self._trainer, self._module, self._targets.package, start=self._start, make_batch=sampler,
            set_batch_size=self._targets.set_batch_size, agreement=self._agreement,
            known_size=self._targets.base_size, will_thaw=will_thaw(self._trainer), provoke_oom=options.provoke_oom,
            accumulation=accumulation_of(self._trainer), clock=self._clock,
        )  # fmt: skip
        try:
            predictions, found = self._found(host, bounds)
            choice = sure_choice(found, base_size=self._targets.base_size, min_confidence=options.min_confidence)
            size = choice.batch_size
            if size != self._targets.base_size:
                (size,) = map(int, self._agreement.smallest([sampler.without_single(size, bounds[0])]))
            return self._result(dataclasses.replace(choice, batch_size=size), found, predictions, host, sampler, bounds)
        finally:
            host.restore()
            host.recorder.forget()

    def _found(self, host: LightningHost, bounds: Bounds) -> tuple[Predictions, SearchResult]:
        options, memory = self._options, host.recorder.memory
        settings = TrialSettings(
            # each size is a new shape of step to a plugin; what it records and verifies is no time to trust
            warmup_steps=options.warmup_steps + (NUM_LEARNING_STEPS if memory is not None else 0),
            timed_steps=options.steps_per_trial,
            memory=memory,
            clock=self._clock,
            is_out_of_memory=host.is_out_of_memory,
            allows_sync_batch_norm=True,
        )
        progress = SearchProgress(self._is_visible)
        runner = TrialRunner(
            host, settings, self._agreement, shown=lambda size: progress.trying(size, total=runner.max_trials)
        )
        smallest, largest, first = bounds
        with progress.shown():
            found = runner.find(
                first=first,
                begin=min(first, self._targets.base_size) if host.is_to_be_watched else first,
                low=smallest,
                high=largest,
                tolerance=options.tolerance,
                max_trials=None,
                max_seconds=options.max_seconds,
            )
        return runner.predictions, found

    def _check_optimizers(self) -> None:
        optimizers = self._trainer.optimizers
        if not optimizers or any(type(optimizer).__name__ == "_MockOptimizer" for optimizer in optimizers):
            raise TuningError(
                f"{type(self._module).__name__}.configure_optimizers() returned no optimizer: a batch size is tuned for"
                " training, return one"
            )

    # ---- what is found

    def _result(
        self,
        choice: Choice,
        found: SearchResult,
        predictions: Predictions,
        host: LightningHost,
        sampler: Sampler,
        bounds: Bounds,
    ) -> TuningResult:
        budget_bytes, size = host.recorder.budget_bytes, choice.batch_size
        rates = self._learning_rate(size)
        # without a limit of memory everything fits, and there is no largest size worth a name
        is_limited = self._agreement.is_true_on_all(budget_bytes is not None)
        predicted = predictions.largest(*bounds[:2]) if is_limited else None
        is_predicted = predicted is not None and found.smallest_failing is None and predicted > found.largest
        return TuningResult(
            batch_size=size,
            found_batch_size=found.batch_size,
            configured_batch_size=self._targets.base_size,
            configured_lr=self._targets.base_rate,
            first_step=int(self._trainer._checkpoint_connector._loaded_checkpoint.get("global_step", 0)),
            lr=rates.lr,
            base_batch_size=rates.base_batch,
            effective_batch_size=self._effective(size),
            lr_factor=rates.factor,
            trials=found.trials,
            predictions=predictions.made(),
            largest_size=predicted if is_predicted else found.largest if is_limited or found.smallest_failing else None,
            largest_plain_size=predictions.largest_plain(*bounds[:2]) if is_limited else None,
            is_largest_predicted=is_predicted,
            confidence=found.confidence,
            budget_bytes=budget_bytes,
            scaling=self._scaling(choice, found, predictions),
            note=_note(choice, found, host.decline, rates.note, sampler.note),
        )

    def _scaling(self, choice: Choice, found: SearchResult, predictions: Predictions) -> Scaling | None:
        """What the chosen size would do on more devices; None where it did not run, or nothing is known of those."""
        speeds = {each.batch_size: each.samples_per_second for each in found.estimates}
        speed = speeds.get(choice.batch_size if choice.why_kept else found.batch_size)
        if speed is None:
            return None
        return predictions.scaling(choice.batch_size, speed, accumulation=accumulation_of(self._trainer))

    def _effective(self, batch_size: int) -> int:
        return effective_batch(batch_size, self._trainer.world_size, accumulation_of(self._trainer))

    def _learning_rate(self, batch_size: int) -> _Rates:
        """Scale the rate for a size, as far as it may be raised."""
        options, targets = self._options, self._targets
        # of a rate that a tuning has set, that tuning knows; the configured batch may be another one again
        base = options.base_batch_size or batch_of_rate(self._module, targets) or self._effective(targets.base_size)
        rule = resolved_rule(options.lr_scaling, self._trainer.optimizers)
        if rule != "none" and self._is_resumed():
            rule = "none"
            rank_zero(
                targets.package,
                "warn",
                "EfficientBatchSizeFinder leaves the learning rate alone: the checkpoint's optimizers and schedulers go"
                " on with theirs. Start from weights alone to have it scaled.",
            )
        wanted = learning_rate_factor(rule=rule, effective_batch=self._effective(batch_size), base_batch=base)
        factor, note = self._allowed_factor(wanted)
        warning = rule_warning(self._trainer.optimizers, rule=rule, factor=factor)
        if warning is not None:
            rank_zero(targets.package, "warn", warning)
        rate = targets.base_rate if targets.base_rate is not None else first_rate(self._trainer.optimizers)
        return _Rates(lr=check_rate(rate * factor), factor=factor, base_batch=base, note=note)

    def _allowed_factor(self, wanted: float) -> tuple[float, str]:
        """By how much the rate may change where a rule wants it to by so much, and what to say of it."""
        options = self._options
        is_warmed_up = options.lr_warmup_steps != 0 or options.lr_warmup_epochs > 0
        if wanted > 1 and is_warmed_up and not all(map(has_step_hooks, self._trainer.optimizers)):
            return 1.0, (
                f"The learning rate stays: it would be raised by {wanted:.3g}, and the optimizer has no hooks around"
                " its step for a warm-up; lr_warmup_steps=0 raises it without"
            )
        if wanted > options.max_lr_factor:
            return options.max_lr_factor, (
                f"The learning rate is raised by {options.max_lr_factor:g}, not by {wanted:.3g} (max_lr_factor)"
            )
        return wanted, ""

    def _is_resumed(self) -> bool:
        """Whether the fit goes on from a checkpoint with optimizers."""
        return bool(self._trainer._checkpoint_connector._loaded_checkpoint.get("optimizer_states"))

    # ---- putting back

    def _restore(self) -> None:
        end_workers(self._trainer.fit_loop)
        self._start.restore()
        for name, value in self._trainer_state.items():
            setattr(self._trainer, name, value)
        # those of the start, if there were any: Lightning would end workers that were never begun
        self._trainer.fit_loop._combined_loader = self._trainer.fit_loop._data_fetcher = None

    def _make_optimizers(self, before: list[list[float]], factor: float) -> tuple[Place, ...]:
        """Make the optimizers anew, in the state that an untuned run makes them in; tell which groups were scaled."""
        strategy = self._trainer.strategy
        if isinstance(strategy.model, DistributedDataParallel) and hasattr(strategy, "configure_ddp"):
            # its reducer has seen backwards that are not to count
            strategy.model = strategy.lightning_module
            gc.collect()
            strategy.configure_ddp()
        self._start.random_states.restore()
        strategy.setup_optimizers(self._trainer)
        schedulers = [config.scheduler for config in strategy.lr_scheduler_configs]
        places = stragglers(strategy.optimizers, before, factor)
        scale_groups(strategy.optimizers, schedulers, places, factor)
        return places


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rates:
    """The learning rate for a size.

    Attributes:
        lr: The rate itself.
        factor: By how much it is scaled.
        base_batch: The effective batch that the configured rate was for.
        note: What a reader should know.
    """

    lr: float
    factor: float
    base_batch: int
    note: str


def _num_steps(trainer: Any) -> float:
    """Optimizer steps of the run as it is configured; infinite where that is not known."""
    if accumulation_schedule(trainer) is not None:
        return math.inf
    num_steps: float = trainer.estimated_stepping_batches
    return num_steps if num_steps > 0 else math.inf


def _note(choice: Choice, found: SearchResult, decline: str, *others: str) -> str:
    notes = [f"{each}." for each in (choice.why_kept, *others) if each]
    if not choice.why_kept and choice.batch_size != found.batch_size:
        notes.append(f"Not {found.batch_size}: its last batch is one sample, which batch norm cannot train on.")
    if decline:
        notes.append(f"Sizes that may not fit were predicted, not tried: {decline}.")
    if found.is_exhausted:
        notes.append(f"The search ran out of {found.ended_by} before it was sure ({found.confidence:.0%}).")
    return " ".join(notes)
