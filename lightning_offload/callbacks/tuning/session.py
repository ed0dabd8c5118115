"""One tuning of one fit: checks, searches, restores, and sets what was found.

A session begins right before Lightning makes the optimizers, where it notes the state that training is to begin from,
and runs when they are made and the model is on its device. At the end the state is put back, the values are set, and
the optimizers are made once more, under the random state and on the dataloaders that an untuned run would have.

With several ranks all make the same trials, and rank zero decides: by its clock, its predictions, and its look at the
batches.
"""

from __future__ import annotations

import dataclasses
import gc
import math
from collections.abc import Callable, Sequence

import torch
from torch.nn.parallel import DistributedDataParallel

from lightning_offload.callbacks.tuning.data import Bounds, Look, TrialData, end_workers
from lightning_offload.callbacks.tuning.length import (
    RunLength,
    StepLimits,
    check_schedules,
    run_batches,
    seconds_allowed,
    step_schedules,
    why_not_resumed,
)
from lightning_offload.callbacks.tuning.objective import GOODPUT, THROUGHPUT, Objective, objective_of
from lightning_offload.callbacks.tuning.pilot import PilotPlan, pilot_plan, shortest_pilot, why_no_noise_scale
from lightning_offload.callbacks.tuning.rates import (
    ScaledRate,
    base_rates,
    is_resumed,
    scaled_rate,
    stragglers,
)
from lightning_offload.callbacks.tuning.result import TuningResult, search_shown, tell_kept
from lightning_offload.callbacks.tuning.targets import Fit, Targets, with_rate_of_now
from lightning_offload.callbacks.tuning.trials import NUM_LEARNING_STEPS, LightningHost
from lightning_offload.capture.live import heap_set_aside
from lightning_offload.errors import BudgetInfeasibleError, OffloadError, TuningError
from lightning_offload.lightning_packages import rank_zero
from lightning_offload.plugins.out_of_memory import release_frames
from lightning_offload.tensors.compiled_code import may_run
from lightning_offload.tuning.acquisition import Space
from lightning_offload.tuning.gates import LEAST_SPEEDUP, Choice, choose, expected_speedups
from lightning_offload.tuning.learning_rate import Place, scale_groups
from lightning_offload.tuning.noise_scale import NoiseScale, estimate_noise_scale, likely_efficiency
from lightning_offload.tuning.predictions import Predictor
from lightning_offload.tuning.runner import TrialRunner, TrialSettings
from lightning_offload.tuning.search import SearchResult
from lightning_offload.tuning.trial import Trial
from lightning_offload.units import format_seconds

__all__ = ["Session"]

_TUNING_SHARE = 0.02
"""Of a run, the most that a pilot may take, and the most that trials may."""
_LEAST_SECONDS = 1.0
"""What a tuning takes at least: making loaders, looking through the heap and deciding are no trials."""
_THROUGHPUT_SECONDS = 60.0
"""What trials may take in a run of any length, where throughput was asked for."""
_WORTH_A_WORD = 1.1
"""How many times the samples per second are told of where they are not taken."""
_LEAST_BATCHES = 128
"""Of a pilot that was asked for, or of a run whose length is not known."""
_TRAINER_STATE = ("val_check_batch", "should_stop", "_train_start_time", "_last_val_time")


class Session:
    """One tuning at the start of a fit: what is tried, in which order, and what is set in the end.

    Args:
        fit: It begins.
        limits: The Trainer's limits in steps, which are set for what is found.
        is_visible: Whether this rank shows progress.
        is_alone: Whether no training follows.
    """

    def __init__(self, fit: Fit, limits: StepLimits, *, is_visible: bool, is_alone: bool) -> None:
        self._fit, self._limits, self._is_visible, self._is_alone = fit, limits, is_visible, is_alone
        self._options, self._trainer, self._module = fit.options, fit.trainer, fit.module
        self._agreement, self._start, self._clock = fit.agreement, fit.start, fit.clock
        self._began = fit.clock()
        # who only tunes has asked for it, however long it takes
        self._is_limited = fit.options.max_seconds is None and not is_alone
        self._trainer_state = {
            name: getattr(fit.trainer, name) for name in _TRAINER_STATE if hasattr(fit.trainer, name)
        }
        self._length = RunLength()
        self._objective = Objective(name=THROUGHPUT, base_size=fit.targets.base_size)
        self._look: Look | None = None  # at the batches
        self._noise: NoiseScale | None = None
        self._most: int | None = None  # the largest size of the search, by the pilot
        self._trials_began = self._pilot_seconds = 0.0
        self._warnings: tuple[str, ...] = ()  # of what is set

    @property
    def _targets(self) -> Targets:
        return self._fit.targets

    def run(self) -> TuningResult | None:
        """Tune; whatever happens, the state is as it was, and the model is set as found or as it was.

        Returns:
            The result; None where the run goes on with what is configured since tuning failed.

        Raises:
            TuningError: There is nothing to tune, or no size fits, and that ends the fit.
        """
        before: list[list[float]] = []
        try:
            self._fit = dataclasses.replace(self._fit, targets=with_rate_of_now(self._targets))
            before = base_rates(self._trainer.optimizers)
            schedules = step_schedules(self._trainer)
            with self._agreement:
                result = self._tuned()
            self._restore()
            self._targets.apply(self._trainer, result.batch_size, result.lr)
            told = self._limits.set(self._trainer, result)
            places = self._make_optimizers(before, result.lr_factor)
            check_schedules(
                schedules, step_schedules(self._trainer), num_steps=self._length.total, ratio=result.batch_ratio,
                num_epochs=self._trainer.max_epochs or 0,
            )  # fmt: skip
        except BaseException as error:
            # what a user does next begins from a model that was not trained
            self._limits.put_back()
            self._restore()
            self._targets.apply(self._trainer, self._targets.base_size, self._targets.base_rate)
            if not (isinstance(error, Exception) and self._goes_on_after(error)):
                raise
            tell_kept(self._targets.package, error, self._targets.base_size)
            release_frames(error)
            self._make_optimizers(before, 1.0)
            return None
        for warning in self._warnings:
            rank_zero(self._targets.package, "warn", warning)
        return dataclasses.replace(result, scaled_groups=places, note=_sentences(result.note.rstrip("."), told))

    def _goes_on_after(self, error: Exception) -> bool:
        """Whether the fit goes on as configured: with several ranks after what all of them know of."""
        if self._options.on_failure == "raise" or self._is_alone:
            return False
        return self._trainer.world_size == 1 or isinstance(error, TuningError) or error is self._agreement.told

    # ---- the way of a tuning

    def _tuned(self) -> TuningResult:
        agreement, base = self._agreement, self._targets.base_size
        self._check_optimizers()
        self._length = agreement.broadcast(
            agreement.together(lambda: RunLength.of(self._trainer), "making the train dataloader")
        )
        self._objective = objective_of(self._fit)
        if why := self._too_short():  # by counts alone, before anything is read
            return self._kept(why)
        data = agreement.together(lambda: TrialData(self._fit), "reading a batch of the train dataloader")
        self._look = data.look
        bounds = data.bounds(self._objective)
        host = LightningHost(self._fit, data, self._objective.accumulation)
        try:
            with search_shown(self._is_visible) as tell, heap_set_aside():
                runner = TrialRunner(host, self._trial_settings(host), agreement, tell=tell)
                self._trials_began = self._clock()
                configured = runner.run(base)  # all others are compared with it
                if why := self._too_quick(configured) or self._pilot(host, configured):
                    return self._kept(why)
                found = self._found(runner, bounds)
            choice = agreement.broadcast(agreement.together(lambda: self._chosen(found), "choosing a size"))
            if choice.batch_size != base:
                lower = data.without_single(choice.batch_size, bounds[0], self._objective.sizes(bounds[1]))
                choice = dataclasses.replace(choice, batch_size=int(agreement.smallest(lower)))
            # without a limit of memory everything fits, and there is no largest size worth a name
            is_limited = agreement.is_true_on_all(host.budget_bytes is not None)
            within = bounds if is_limited else None
            result = agreement.together(
                lambda: self._of_search(choice, found, runner.predictor, host, within), "predicting sizes"
            )
            return agreement.broadcast(result)
        finally:
            host.forget()
            if may_run():  # code that was compiled for all sizes is not that of the one that is trained with
                torch.compiler.reset()

    def _check_optimizers(self) -> None:
        optimizers = self._trainer.optimizers
        if not optimizers or any(type(optimizer).__name__ == "_MockOptimizer" for optimizer in optimizers):
            raise TuningError(
                f"{type(self._module).__name__}.configure_optimizers() returned no optimizer: a batch size is tuned for"
                " training, return one"
            )

    def _too_short(self) -> str:
        """Why nothing is tried in this run, by counts alone; empty where a tuning pays, or was asked for."""
        configured = self._targets.base_size * self._objective.configured_accumulation
        if why := why_not_resumed(self._trainer, keeps_batch=self._objective.samples_per_rank == configured):
            return why
        if self._objective.name == GOODPUT:
            if why := why_no_noise_scale(self._trainer, self._module):
                return f"the gradient noise scale is not known, since {why}; objective='throughput' does without"
            if math.isfinite(self._length.left) and self._pilot_plan(()) is None:
                return self._why_no_pilot()
        trial = self._options.warmup_steps + self._options.steps_per_trial
        num_batches = self._length.left * self._objective.configured_accumulation
        if not self._is_share_limited or trial <= _TUNING_SHARE * num_batches:
            return ""
        return (
            f"the run has {num_batches:g} steps, of which the {trial} of a single trial are more than"
            f" {_TUNING_SHARE:.0%}; max_seconds= sets another limit, objective='throughput' has none"
        )

    def _too_quick(self, configured: Trial) -> str:
        """Why nothing more is tried in a run that takes so little time; empty where a tuning pays, or was asked for."""
        if not self._is_share_limited:
            return ""
        run_seconds = self._agreement.broadcast(self._run_seconds((configured,)))
        if run_seconds is None or _TUNING_SHARE * run_seconds >= _LEAST_SECONDS:
            return ""
        return (
            f"the run takes about {format_seconds(run_seconds)}, and a tuning a second or more, whatever it tries;"
            " max_seconds= sets another limit, objective='throughput' has none"
        )

    @property
    def _is_share_limited(self) -> bool:
        """Whether a tuning may take a share of a run, whose length is known."""
        is_known = math.isfinite(min(self._length.left, seconds_allowed(self._trainer)))
        return self._is_limited and is_known and self._objective.name != THROUGHPUT

    # ---- the pilot

    def _pilot(self, host: LightningHost, configured: Trial) -> str:
        """Measure the noise scale, where it is needed and the configured size fits; tell why it cannot be.

        Where that size does not fit, a smaller one has to be found, whatever a sample is worth in it.
        """
        if self._objective.name != GOODPUT:
            return ""
        base = self._targets.base_size
        if not configured.is_ok:
            self._objective = dataclasses.replace(self._objective, name=THROUGHPUT)
            self._most = base
            return ""
        plan = self._agreement.broadcast(self._pilot_plan((configured,)))  # by what a step takes, which is known now
        if plan is None:
            return self._why_no_pilot()
        num_steps = 0.0 if is_resumed(self._trainer) else self._length.left
        began = self._clock()
        try:
            # ranks exchange gradients, so one that fails ends the job, as it would in the training
            steps = host.pilot(batch_size=base, plan=plan, num_steps=num_steps, is_late=self._late_after(began))
        except Exception as error:
            is_memory = isinstance(error, (torch.OutOfMemoryError, BudgetInfeasibleError))
            if self._agreement.num_ranks > 1 or not (is_memory or host.is_out_of_memory(error)):
                raise
            release_frames(error)
            return "a pilot, which holds a second set of gradients, ran out of memory"
        self._pilot_seconds = self._clock() - began
        micro = zip(*self._agreement.gather([step.micro for step in steps]), strict=True)
        shared = [
            dataclasses.replace(step, micro=sum(squares) / len(squares))
            for step, squares in zip(steps, micro, strict=True)
        ]
        self._noise = self._agreement.broadcast(estimate_noise_scale(shared))
        if self._noise is None:
            return "too few steps of the pilot had finite gradients of each of their batches"
        least, batch = self._options.min_efficiency, self._effective(base)
        if least:  # a run of so many epochs is to end where it did, so a sample has to be worth enough
            largest = (self._noise.low + batch) / least - self._noise.low  # of the effective batch
            self._most = max(base, int(largest * base / batch))
        return ""

    def _pilot_plan(self, trials: Sequence[Trial]) -> PilotPlan | None:
        """Plan a pilot: a share of the run, and half of the time that the user gives, as far as these are known.

        Args:
            trials: That of the configured size, or none yet.
        """
        accumulation = self._objective.configured_accumulation
        least = max(_LEAST_BATCHES, shortest_pilot(accumulation))
        if math.isfinite(self._length.left):
            most = _TUNING_SHARE * self._length.left * accumulation
        else:
            most = min(least, _TUNING_SHARE * self._agreement.broadcast(run_batches(self._trainer)))
        if not self._is_limited:
            most = max(most, least)
        speeds = [each.samples_per_second for each in trials]
        if self._options.max_seconds is not None and speeds and speeds[0]:
            batch_seconds = self._targets.base_size * self._agreement.num_ranks / speeds[0]
            most = min(most, self._options.max_seconds / 2 / batch_seconds)
        return pilot_plan(most, most_measured=self._options.pilot_steps, accumulation=accumulation)

    def _why_no_pilot(self) -> str:
        shortest, seconds = shortest_pilot(self._objective.configured_accumulation), self._options.max_seconds
        pilot = f"a pilot of {shortest} batches, which measures the gradient noise scale,"
        if seconds is not None:
            return f"{pilot} takes more than half of max_seconds={seconds:g}"
        return f"{pilot} is more than {_TUNING_SHARE:.0%} of the run; max_seconds= sets another limit"

    def _late_after(self, began: float) -> Callable[[], bool]:
        """Whether a pilot has taken half of the time that the user gives: trials do not show how slow loaders are.

        With several ranks it is as long as planned.
        """
        seconds = self._options.max_seconds
        if seconds is None or self._agreement.num_ranks > 1:
            return lambda: False
        return lambda: self._clock() - began >= seconds / 2

    # ---- the search

    def _trial_settings(self, host: LightningHost) -> TrialSettings:
        options = self._options
        return TrialSettings(
            # each size is a new shape of step to a plugin; what it records and verifies is no time to trust
            warmup_steps=options.warmup_steps + (NUM_LEARNING_STEPS if host.memory is not None else 0),
            timed_steps=options.steps_per_trial,
            memory=host.memory,
            clock=self._clock,
            is_out_of_memory=host.is_out_of_memory,
            allows_sync_batch_norm=True,
        )

    def _found(self, runner: TrialRunner, bounds: Bounds) -> SearchResult:
        smallest, largest, first = bounds
        largest = largest if self._most is None else min(largest, self._most)
        space = Space(
            low=smallest, high=largest, start=min(first, largest), tolerance=self._options.tolerance,
            sizes=self._objective.sizes(largest), efficiency=self._efficiency,
        )  # fmt: skip
        return runner.find(space, max_trials=self._options.max_trials, until=self._until)

    def _until(self, trials: Sequence[Trial]) -> float:
        """When the last trial may begin, by what trials show of the run: a pilot has a share of its own."""
        if self._options.max_seconds is not None:
            return self._trials_began + self._options.max_seconds
        seconds = self._run_seconds(trials) if self._is_limited else math.inf
        if self._options.objective == THROUGHPUT and self._is_limited:
            return self._trials_began + max(_THROUGHPUT_SECONDS, _TUNING_SHARE * (seconds or 0.0))
        return math.inf if seconds is None else self._trials_began + self._pilot_seconds + _TUNING_SHARE * seconds

    def _efficiency(self, batch_size: int) -> float:
        """What throughput in trials of a size counts for: by what a sample is likely worth, and by lengths."""
        worth, base = 1.0, self._targets.base_size
        if self._noise is not None:
            batches = {"base_batch": self._effective(base), "batch": self._effective(batch_size)}
            worth = likely_efficiency(self._noise, **batches)
        return worth / self._mean_length(batch_size)

    def _mean_length(self, batch_size: int) -> float:
        """What a mean step takes by one of a trial."""
        return 1.0 if self._look is None else self._look.mean_length(batch_size / self._targets.base_size)

    def _run_seconds(self, trials: Sequence[Trial]) -> float | None:
        """What is left of the configured run takes, by the trial of the size that is nearest to the configured one."""
        base, allowed = self._targets.base_size, seconds_allowed(self._trainer)
        ran = [each for each in trials if each.is_ok and each.samples_per_second]
        if not ran or not math.isfinite(self._length.left):
            return allowed if math.isfinite(allowed) else None
        nearest = min(ran, key=lambda trial: abs(math.log(trial.batch_size / base)))
        num_samples = self._length.left * self._effective(base)
        return min(allowed, self._mean_length(base) * num_samples / (nearest.samples_per_second or 1.0))

    # ---- what is found

    def _chosen(self, found: SearchResult) -> Choice:
        """What is set, and what is expected of the best; on rank zero."""
        base, objective = self._targets.base_size, self._objective
        counts_tuning = self._is_limited and objective.name != THROUGHPUT  # of a run of any length
        speedups = expected_speedups(
            found,
            base_size=base,
            samples=self._effective(base) // base,
            noise=self._noise,
            mean_length=self._mean_length,
            tuning_seconds=self._clock() - self._began,
            run_seconds=(self._run_seconds(found.trials) if counts_tuning else None) or math.inf,
        )
        least = {THROUGHPUT: None, GOODPUT: LEAST_SPEEDUP}.get(objective.name, 1.0)
        return choose(found, speedups, base_size=base, min_confidence=self._options.min_confidence, least=least)

    def _of_search(
        self,
        choice: Choice,
        found: SearchResult,
        predictor: Predictor | None,
        host: LightningHost,
        within: Bounds | None,
    ) -> TuningResult:
        """The result of a search; predictions are rank zero's, of sizes within some bounds where memory has a limit."""
        speedup = choice.speedup
        largest, plain = _largest_predicted(predictor, within)
        is_predicted = largest is not None and found.smallest_failing is None and largest > found.largest
        if not is_predicted:
            largest = found.largest if within is not None or found.smallest_failing is not None else None
        notes = [self._left(choice, found), "" if self._look is None else self._look.note(self._targets.base_size)]
        if not choice.why_kept and choice.batch_size != choice.best_size:
            notes.append(f"Not {choice.best_size}: its last batch is one sample, which batch norm cannot train on")
        if host.decline:
            notes.append(f"Sizes that may not fit were predicted, not tried: {host.decline}")
        if found.is_exhausted:
            notes.append(f"The search ran out of {found.ended_by} before it was sure ({found.confidence:.0%})")
        return dataclasses.replace(
            self._result(choice, *notes),
            expected_speedup=None if speedup is None else speedup.value,
            expected_interval=None if speedup is None else (speedup.low, speedup.high),
            run_seconds=self._run_seconds(found.trials),
            trials=found.trials,
            predictions=() if predictor is None else predictor.made,
            largest_size=largest,
            largest_plain_size=plain,
            is_largest_predicted=is_predicted,
            budget_bytes=host.budget_bytes,
        )

    def _kept(self, why: str) -> TuningResult:
        """The configured size, where nothing was searched."""
        base = self._targets.base_size
        return self._result(Choice(batch_size=base, best_size=base, confidence=0.0, why_kept=why))

    def _result(self, choice: Choice, *notes: str) -> TuningResult:
        """What is set, what it is set in place of, and why."""
        size, base, noise, objective = choice.batch_size, self._targets.base_size, self._noise, self._objective
        rates = self._rates(size)
        self._warnings = rates.warnings
        why = choice.why_kept
        if why:
            why = f"The configured {base} is kept: {why}{self._changed_all_the_same(rates)}"
        return TuningResult(
            batch_size=size,
            found_batch_size=choice.best_size,
            configured_batch_size=base,
            effective_batch_size=self._effective(size),
            base_batch_size=rates.base_batch,
            lr=rates.lr,
            configured_lr=self._targets.base_rate,
            lr_factor=rates.factor,
            accumulation=objective.accumulation(size),
            configured_accumulation=objective.configured_accumulation,
            objective=objective.name,
            noise_scale=None if noise is None else noise.value,
            noise_scale_interval=None if noise is None else (noise.low, noise.high),
            first_step=self._length.done,
            tuning_seconds=self._clock() - self._began,
            confidence=choice.confidence,
            note=_sentences(why, rates.note, *notes),
        )

    def _left(self, choice: Choice, found: SearchResult) -> str:
        """What a configured size that is kept leaves to those who want throughput; nothing where that is little."""
        base = self._targets.base_size
        speeds = {each.batch_size: each.samples_per_second for each in found.estimates}
        if self._objective.name == THROUGHPUT or choice.batch_size != base or not speeds.get(base):
            return ""
        size = max(speeds, key=lambda each: speeds[each])
        ratio = speeds[size] / speeds[base]
        if ratio < _WORTH_A_WORD:
            return ""
        rate = f" at {self._rates(size).factor:.3g} times the rate" if self._objective.samples_per_rank is None else ""
        return (
            f"{size} would give {ratio:.1f} times the samples per second{rate}, which may not train as well in as many"
            " samples: objective='throughput' takes it"
        )

    def _changed_all_the_same(self, rates: ScaledRate) -> str:
        """What changes though the configured size is kept: the rate is for another effective batch, or that is kept."""
        before, number = self._objective.configured_accumulation, self._objective.accumulation(self._targets.base_size)
        changed = [f"{number} micro-batches are accumulated, not {before}"] if number != before else []
        if rates.factor != 1.0:
            changed.append(f"the learning rate is multiplied by {rates.factor:.3g}")
        return f"; since the base batch is {rates.base_batch}, {' and '.join(changed)}" if changed else ""

    def _effective(self, batch_size: int) -> int:
        return batch_size * int(self._trainer.world_size) * self._objective.accumulation(batch_size)

    def _rates(self, batch_size: int) -> ScaledRate:
        """The rate for a size."""
        configured = self._effective(self._targets.base_size)
        return scaled_rate(self._fit, effective=self._effective(batch_size), configured=configured, noise=self._noise)

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


def _largest_predicted(predictor: Predictor | None, within: Bounds | None) -> tuple[int | None, int | None]:
    """The largest sizes that are predicted to fit: with a memory plan, and without one."""
    if predictor is None or within is None:
        return None, None
    smallest, largest, _ = within
    try:
        return predictor.largest_feasible(smallest, largest), predictor.plain().largest_feasible(smallest, largest)
    except OffloadError:  # beyond the model
        return None, None


def _sentences(*texts: str) -> str:
    return " ".join(f"{each}." for each in texts if each)
