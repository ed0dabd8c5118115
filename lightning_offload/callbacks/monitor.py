"""`OffloadMonitor`: what the memory plan costs and saves, in the loggers and in the progress bar.

It follows DeviceStatsMonitor: metrics go to every logger at the end of a training batch, every
`log_every_n_steps` steps, under the logger's own group separator. The class is built per Lightning package,
as the strategy is, but uses only what the Trainer hands it, so either Trainer can run it.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from lightning_offload.lightning_packages import build_class, import_from, package_for
from lightning_offload.plugins.memory import MemoryPlugin
from lightning_offload.report.scale import bytes_unit

if TYPE_CHECKING:
    from lightning.pytorch import Callback as _CallbackBase
    from lightning.pytorch import LightningModule, Trainer
else:
    _CallbackBase = object  # the real base comes from the package in use, see build_monitor

PREFIX = "offload"


class OffloadMonitorMixin(_CallbackBase):
    """Logs peak, budget, stall and the bytes kept, swapped and recomputed of the training steps.

    Loggers receive `offload/peak_bytes`, `offload/budget_bytes`, `offload/stall_seconds`,
    `offload/step_seconds`, `offload/kept_bytes`, `offload/swapped_bytes`, `offload/recomputed_bytes`,
    `offload/host_peak_bytes`; of the shapes of steps `offload/num_shapes`, `offload/num_at_first_sight` (planned from
    their first step on), `offload/num_deviations`, `offload/num_aligned` (under the plan for another structure),
    `offload/astray_bytes` (which these saved and it did not have) and `offload/planning_seconds`. A value that is not
    known yet is left out. The progress bar has one item: the measured peak of the budget, `mem: 7.8/8.0 GiB`.

    Args:
        progress_bar: Whether to show the peak in the progress bar too.

    Raises:
        MisconfigurationException: At fit start, if the Trainer's strategy is not an offload strategy, or if
            it has neither a logger nor a progress bar to write to.
    """

    def __init__(self, progress_bar: bool = True) -> None:
        super().__init__()
        self._progress_bar = progress_bar
        self._shown = ""

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Checks that there is something to monitor and somewhere to write."""
        if stage != "fit":
            return
        self._shown = ""
        if _memory_of(trainer) is None:
            raise _misconfiguration(
                trainer,
                f"Cannot use `OffloadMonitor` with the strategy `{type(trainer.strategy).__name__}`, which"
                f" offloads nothing: use `Trainer(strategy={_fitting_strategy(trainer)})`.",
            )
        if not trainer.loggers and not self._has_progress_bar(trainer):
            raise _misconfiguration(
                trainer,
                "Cannot use `OffloadMonitor` with `Trainer(logger=False)` and no progress bar: there is"
                " nowhere to write.",
            )

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Write the metrics of the step that just ended, if it is one to be logged."""
        memory = _memory_of(trainer)
        if memory is None or not memory.enabled:
            return
        if trainer._logger_connector.should_update_logs:
            report = memory.report()
            self._shown = peak_of_budget(report.measured_peak_bytes, report.budget_bytes)
            for logger in trainer.loggers:
                metrics = report.metrics(f"{PREFIX}{logger.group_separator}")
                logger.log_metrics(metrics, step=trainer.fit_loop.epoch_loop._batches_that_stepped)
        if self._shown and self._has_progress_bar(trainer):
            # `log` takes numbers alone; bars show text too, such as the logger's version. Repeated every batch: what is
            # there is dropped now and then
            trainer._logger_connector._progress_bar_metrics["mem"] = self._shown  # type: ignore[assignment]

    def _has_progress_bar(self, trainer: Trainer) -> bool:
        return self._progress_bar and trainer.progress_bar_callback is not None


def _memory_of(trainer: Trainer) -> MemoryPlugin | None:
    memory = getattr(trainer.strategy, "memory", None)
    return memory if isinstance(memory, MemoryPlugin) else None


def _misconfiguration(trainer: Trainer, message: str) -> Exception:
    """Lightning's own exception, of the package that `trainer` comes from."""
    error: Exception = import_from(package_for(trainer), "utilities.exceptions").MisconfigurationException(message)
    return error


def _fitting_strategy(trainer: Trainer) -> str:
    """The strategy of ours that does what the Trainer was asked for."""
    is_one_of_several = trainer.num_devices * trainer.num_nodes > 1 or "DDP" in type(trainer.strategy).__name__
    name = "DDPOffloadStrategy" if is_one_of_several else "OffloadStrategy"
    return f"lightning_offload.{name}(...)"


def peak_of_budget(peak_bytes: int | None, budget_bytes: int | None) -> str:
    """A peak and its budget in one unit, the peak alone where there is no budget; "" where no peak is known.

    >>> peak_of_budget(8375186227, 8 << 30), peak_of_budget(5 << 20, None), peak_of_budget(None, 1)
    ('7.8/8.0 GiB', '5.0 MiB', '')
    """
    if peak_bytes is None:
        return ""
    unit = bytes_unit(max(peak_bytes, budget_bytes or 0))
    budget = f"/{budget_bytes / unit.size:.1f}" if budget_bytes is not None else ""
    return f"{peak_bytes / unit.size:.1f}{budget} {unit.name}"


@functools.cache
def build_monitor(package: str) -> type[OffloadMonitorMixin]:
    """Builds the class `OffloadMonitor` for the Lightning package `package`, importing it if need be."""
    return build_class(OffloadMonitorMixin, "OffloadMonitor", import_from(package, "callbacks").Callback)
