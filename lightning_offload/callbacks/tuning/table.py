"""The trials as one table, predicted beside measured, and the progress of the search. Rank zero alone shows them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from lightning_offload.tuning.scaling import COLUMNS
from lightning_offload.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.table import Table

    from lightning_offload.callbacks.tuning.result import TuningResult
    from lightning_offload.tuning.scaling import Scaling
    from lightning_offload.tuning.trial import Trial

__all__ = ["SearchProgress", "scaling_table", "summary", "trials_table"]

_TRIALS = ("size", "step", "samples/s", "predicted", "peak", "predicted", "")


def trials_table(result: TuningResult) -> Table:
    """One row per trial, in the order of batch sizes; the chosen size is marked."""
    from rich.table import Table

    table = Table(title="Trials of batch sizes", caption=summary(result), header_style="bold magenta")
    for name in _TRIALS[:-1]:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column(_TRIALS[-1], overflow="fold", min_width=6)
    for trial in sorted(result.trials, key=lambda trial: trial.batch_size):
        is_chosen = trial.is_ok and trial.batch_size == result.batch_size
        table.add_row(*_cells(trial, is_chosen=is_chosen), style="bold" if is_chosen else "" if trial.is_ok else "dim")
    return table


def scaling_table(scaling: Scaling) -> Table:
    """One row per number of devices."""
    from rich.table import Table

    table = Table(
        title="Simulated: the chosen size on more devices", caption=scaling.caption, header_style="bold magenta"
    )
    for name in COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    for row in scaling.rows:
        table.add_row(*row)
    return table


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
    """What was chosen, in a sentence or two."""
    rate = "" if result.lr is None else f", learning rate {result.lr:g}"
    scaled = "" if result.lr_factor == 1.0 else f" (x{result.lr_factor:g})"
    text = f"batch size {result.batch_size} (effective {result.effective_batch_size}){rate}{scaled}"
    if result.largest_size is not None:
        how = "predicted" if result.is_largest_predicted else "tried"
        text += f"; largest that fits: {result.largest_size} ({how})"
    if result.largest_plain_size is not None and result.largest_plain_size != result.largest_size:
        text += f", without a memory plan {result.largest_plain_size} (predicted)"
    return f"{text}. {result.note}" if result.note else text


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.4g}" if value < 1000 else f"{value:,.0f}"


def _bytes(value: int | None) -> str:
    return "" if value is None else format_bytes(value)


class SearchProgress:
    """A progress bar over the trials, where the Trainer shows one.

    Args:
        is_visible: Whether to show it at all.
        total: Most trials that there can be.
    """

    def __init__(self, is_visible: bool, total: int) -> None:
        self._is_visible, self._total = is_visible, total
        self._progress: Any = None
        self._task: Any = None

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """Show the bar inside."""
        if not self._is_visible:
            yield
            return
        from rich import progress

        columns = (progress.TextColumn("{task.description}"), progress.BarColumn(), progress.MofNCompleteColumn())
        with progress.Progress(*columns, progress.TimeElapsedColumn(), transient=True) as self._progress:
            self._task = self._progress.add_task("Finding the efficient batch size", total=self._total)
            try:
                yield
            finally:
                self._progress = None

    def trying(self, batch_size: int) -> None:
        """A trial begins."""
        if self._progress is not None:
            self._progress.update(self._task, description=f"Trying batch size {batch_size}")

    def tried(self) -> None:
        """A trial ended."""
        if self._progress is not None:
            self._progress.advance(self._task)
