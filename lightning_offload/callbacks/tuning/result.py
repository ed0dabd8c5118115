"""What a tuning settled on, as plain data that travels in a checkpoint, and how it is shown: tables, a line, plots.

Rank zero alone shows it. The plots are an HTML page, and a PNG where matplotlib is installed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_offload.errors import OffloadError, TuningError
from lightning_offload.lightning_packages import rank_zero
from lightning_offload.report.printed import Printed
from lightning_offload.report.tuning_plot import TuningCurve, TuningPoint, save_tuning_html, save_tuning_png
from lightning_offload.tuning.noise_scale import batch_efficiency
from lightning_offload.tuning.posterior import pool
from lightning_offload.tuning.trial import Prediction, Trial
from lightning_offload.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.table import Table


_SCHEMA = 1
_INTERVALS = ("noise_scale_interval", "expected_interval")


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningResult(Printed):
    """The chosen batch size and learning rate, and what they were chosen from.

    Attributes:
        batch_size: Samples of one step on one rank.
        found_batch_size: What the search found; `batch_size` is another one where it was not sure enough.
        lr: The learning rate in force with it; that of the first group where the model keeps none.
        base_batch_size: Effective batch (samples of one optimizer step, all ranks) that the rate was given for.
        effective_batch_size: The same with the chosen size.
        configured_batch_size: Samples of one step on one rank as the user gave them.
        configured_lr: The learning rate as the user gave it; None where the model keeps none.
        accumulation: Micro-batches of an optimizer step with the chosen size.
        configured_accumulation: The same as the user gave it.
        objective: What was to be best: "keep_effective_batch", "goodput" or "throughput".
        noise_scale: The gradient noise scale, in samples; None where it was not measured.
        noise_scale_interval: The values that it may have, with a probability of 95%.
        warmup_steps: Optimizer steps over which a raised rate is reached; None before training begins, and where it is
            not raised or not warmed up.
        expected_speedup: How many times as early the run is expected to end for the same progress with
            `found_batch_size`, tuning included but for objective "throughput"; None where that is not known.
        expected_interval: Where that surely lies, by the noise of the trials and of the noise scale.
        tuning_seconds: What the tuning took.
        run_seconds: What was left of the configured run was estimated to take; None where its length is not known.
        first_step: Optimizer steps of a checkpoint that the run had begun from when it was tuned.
        lr_factor: By how much the rate was scaled; 1.0 where it was left as it was.
        scaled_groups: Parameter groups (number of the optimizer, and of the group in it) whose rates are scaled when
            the optimizers are made, since they do not follow the model's.
        trials: Every trial, in the order that they ran, measured figures beside predicted ones.
        predictions: What the performance model says of the sizes tried and of those between them.
        largest_size: The largest size that fits the budget under the memory plan (or as the run is, where there is
            none): found by trial, or predicted where `is_largest_predicted`. None where nothing limits memory.
        largest_plain_size: The largest that fits without a memory plan; predicted. None where that is not known.
        is_largest_predicted: Whether no trial was run at `largest_size`.
        confidence: How probably the size is right, by the trials; from 0 to 1. 0 where another was found that is not
            sure enough to be set, and this one surely is faster than the configured one.
        budget_bytes: The budget that limited the search; None without a limit.
        note: What a reader should know, such as why sizes were predicted and not tried.
    """

    batch_size: int
    lr: float | None
    base_batch_size: int
    effective_batch_size: int
    found_batch_size: int
    configured_batch_size: int
    configured_lr: float | None = None
    accumulation: int = 1
    configured_accumulation: int = 1
    objective: str = "throughput"
    noise_scale: float | None = None
    noise_scale_interval: tuple[float, float] | None = None
    warmup_steps: int | None = None
    expected_speedup: float | None = None
    expected_interval: tuple[float, float] | None = None
    tuning_seconds: float = 0.0
    run_seconds: float | None = None
    first_step: int = 0
    lr_factor: float = 1.0
    scaled_groups: tuple[tuple[int, int], ...] = ()
    trials: tuple[Trial, ...] = ()
    predictions: tuple[Prediction, ...] = ()
    largest_size: int | None = None
    largest_plain_size: int | None = None
    is_largest_predicted: bool = False
    confidence: float = 0.0
    budget_bytes: int | None = None
    note: str = ""

    @property
    def batch_ratio(self) -> Fraction:
        """The effective batch by the configured one."""
        configured = self.configured_batch_size * self.configured_accumulation
        return Fraction(self.batch_size * self.accumulation, configured)

    @property
    def size_ratio(self) -> Fraction:
        """The batch of a rank by the configured one."""
        return Fraction(self.batch_size, self.configured_batch_size)

    def __rich__(self) -> Table | str:
        """Its trials, and what was chosen."""
        return trials_table(self) if self.trials else summary(self)

    def state_dict(self) -> dict[str, Any]:
        """The result as plain containers, safe to load with `weights_only=True`."""
        return {"schema": _SCHEMA, **dataclasses.asdict(self)}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> TuningResult:
        """Read what `state_dict` wrote.

        Raises:
            TuningError: It is not a state of this version.
        """
        values = {key: value for key, value in state.items() if key != "schema"}
        try:
            values["scaled_groups"] = tuple((number, index) for number, index in values["scaled_groups"])
            values["trials"] = tuple(Trial(**{**t, "step_seconds": tuple(t["step_seconds"])}) for t in values["trials"])
            for name in _INTERVALS:
                interval = values.get(name)
                values[name] = None if interval is None else (float(interval[0]), float(interval[1]))
            values["predictions"] = tuple(Prediction(**p) for p in values["predictions"])
            if state["schema"] != _SCHEMA:
                raise KeyError(f"schema {state['schema']}")
            return cls(**values)
        except (KeyError, TypeError) as error:
            raise TuningError(
                f"the checkpoint's state of EfficientBatchSizeFinder cannot be read ({error!r}): it is from another"
                " version; remove the callback from this run and set the batch size"
            ) from None


_TRIALS = ("size", "step", "samples/s", "predicted", "peak", "predicted", "")


def trials_table(result: TuningResult) -> Table:
    """One row per size that was tried, ascending; the chosen one is marked."""
    from rich.table import Table

    table = Table(title="Trials of batch sizes", caption=summary(result), header_style="bold magenta")
    for name in _TRIALS[:-1]:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column(_TRIALS[-1], overflow="fold", min_width=6)
    for trial in merged(result.trials):
        is_chosen = trial.is_ok and trial.batch_size == result.batch_size
        table.add_row(*_cells(trial, is_chosen=is_chosen), style="bold" if is_chosen else "" if trial.is_ok else "dim")
    return table


def merged(trials: Iterable[Trial]) -> list[Trial]:
    """One trial for each size, ascending: what repeats of all that went well say together, or the failure."""
    by_size: dict[int, list[Trial]] = {}
    for trial in trials:
        by_size.setdefault(trial.batch_size, []).append(trial)
    return [_together(by_size[size]) for size in sorted(by_size)]


def _together(trials: list[Trial]) -> Trial:
    failed = [trial for trial in trials if not trial.is_ok]
    if failed:
        return failed[0]
    (estimate,) = pool(trials).values()
    return dataclasses.replace(
        trials[-1],
        samples_per_second=estimate.samples_per_second,
        peak_bytes=max((trial.peak_bytes for trial in trials if trial.peak_bytes is not None), default=None),
        step_seconds=tuple(itertools.chain.from_iterable(trial.step_seconds for trial in trials)),
    )


def _cells(trial: Trial, *, is_chosen: bool) -> tuple[str, ...]:
    middle = sorted(trial.step_seconds)[len(trial.step_seconds) // 2] if trial.step_seconds else None
    return (
        str(trial.batch_size),
        format_seconds(middle) if middle is not None else "",
        _number(trial.samples_per_second),
        _number(trial.predicted_samples_per_second),
        _bytes(trial.peak_bytes),
        _bytes(trial.predicted_peak_bytes),
        "chosen" if is_chosen else trial.reason,
    )


def summary(result: TuningResult) -> str:
    """What was chosen, what is expected of it, and what it took, in a sentence; and what a reader should know."""
    configured = result.configured_batch_size
    text = f"Batch size {result.batch_size}"
    if result.batch_size != configured:
        text += f" in place of {configured}"
    if result.accumulation != result.configured_accumulation:
        text += f", accumulated {result.accumulation} and not {result.configured_accumulation} times"
    text += f" (effective {result.effective_batch_size})"
    if result.lr is not None:
        text += f", learning rate {result.lr:g}"
    if result.lr_factor != 1.0:
        text += f" (x{result.lr_factor:g})"
    parts = [text, *filter(None, (_expected(result), _largest(result), _cost(result)))]
    return " ".join(filter(None, ("; ".join(parts) + ".", result.note)))


def _expected(result: TuningResult) -> str:
    """What is expected of the best size, where that is another one, and from which noise scale."""
    told = []
    value, interval = result.expected_speedup, result.expected_interval
    if value is not None and interval is not None and result.found_batch_size != result.configured_batch_size:
        size = "it" if result.found_batch_size == result.batch_size else result.found_batch_size
        told.append(f"with {size} the run ends {value:.2f} times as early ({interval[0]:.2f} to {interval[1]:.2f})")
    noise, interval = result.noise_scale, result.noise_scale_interval
    if noise is not None and interval is not None:
        told.append(f"the gradient noise scale is {noise:.3g} samples ({interval[0]:.3g} to {interval[1]:.3g})")
    return ", ".join(told)


def _largest(result: TuningResult) -> str:
    """The largest sizes that fit."""
    if result.largest_size is None:
        return ""
    text = f"largest that fits: {result.largest_size} ({'predicted' if result.is_largest_predicted else 'tried'})"
    if result.largest_plain_size is not None and result.largest_plain_size != result.largest_size:
        text += f", without a memory plan {result.largest_plain_size} (predicted)"
    return text


def _cost(result: TuningResult) -> str:
    """What the tuning took."""
    if not result.tuning_seconds:
        return ""
    share = f", {result.tuning_seconds / result.run_seconds:.1%} of the run" if result.run_seconds else ""
    return f"the tuning took {format_seconds(result.tuning_seconds)}{share}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.4g}" if value < 1000 else f"{value:,.0f}"


def _bytes(value: int | None) -> str:
    return "" if value is None else format_bytes(value)


@contextlib.contextmanager
def search_shown(is_visible: bool) -> Iterator[Callable[[int], None]]:
    """Show that a search runs inside, and which size it tries; gives what is to be told of each."""
    if not is_visible:
        yield lambda _: None
        return
    from rich import get_console

    with get_console().status("Finding the efficient batch size") as status:
        yield lambda batch_size: status.update(f"Trying batch size {batch_size}")


NAME = "batch_size"


def curve_of(result: TuningResult) -> TuningCurve:
    """The points and marks of a result."""

    def point(found: Trial | Prediction, *, is_feasible: bool) -> TuningPoint:
        return TuningPoint(
            batch_size=found.batch_size,
            is_predicted=isinstance(found, Prediction),
            samples_per_second=found.samples_per_second,
            peak_bytes=found.peak_bytes,
            is_feasible=is_feasible,
            goodput=_goodput(result, found),
        )

    measured = [point(trial, is_feasible=trial.is_ok) for trial in result.trials]
    predicted = [point(prediction, is_feasible=prediction.is_feasible) for prediction in result.predictions]
    return TuningCurve(
        points=(*measured, *predicted),
        chosen=result.batch_size,
        largest=result.largest_size,
        largest_plain=result.largest_plain_size,
        budget_bytes=result.budget_bytes,
        lead=summary(result),
    )


def _goodput(result: TuningResult, tried: Trial | Prediction) -> float | None:
    """Throughput by what a sample is worth, by the estimate of the noise scale; None where there is none."""
    if result.noise_scale is None or tried.samples_per_second is None:
        return None
    samples = result.effective_batch_size / result.batch_size  # of an optimizer step, for each of a rank's batch
    batches = {"base_batch": samples * result.configured_batch_size, "batch": samples * tried.batch_size}
    return tried.samples_per_second * batch_efficiency(result.noise_scale, **batches)


def save_plots(result: TuningResult, folder: str | os.PathLike[str], package: str) -> None:
    """Write both plots; one that cannot be written is a warning, since the training is what was asked for."""
    target = Path(folder)
    curve = curve_of(result)
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        rank_zero(package, "warn", f"no plot of the trials: the folder {str(target)!r} cannot be made ({error})")
        return
    for save, suffix in ((save_tuning_html, "html"), (save_tuning_png, "png")):
        try:
            save(target / f"{NAME}.{suffix}", curve)
        except OffloadError as error:
            rank_zero(package, "warn", f"no {suffix.upper()} plot of the trials: {error}")


def tell_kept(package: str, error: Exception, batch_size: int | None = None) -> None:
    """Tell in one line that a run goes on as configured since tuning failed, on rank zero."""
    why = "".join(str(error).strip().splitlines()[:1])
    kind = "" if isinstance(error, TuningError) else f"{type(error).__name__}: "
    size = f"the configured {batch_size}" if batch_size is not None else "what is configured"
    told = f"EfficientBatchSizeFinder keeps {size}: {kind}{why} (on_failure='raise' ends the fit instead)"
    rank_zero(package, "warn", told)


def show(result: TuningResult, trainer: Any, package: str, plot_dir: str | os.PathLike[str] | None) -> None:
    """Show a result, on rank zero, with plots where there is a folder for them."""
    if not trainer.is_global_zero:
        return
    from rich import get_console

    get_console().print(result)
    if plot_dir is not None:
        save_plots(result, plot_dir, package)
