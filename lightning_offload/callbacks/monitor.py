"""`OffloadMonitor`: what the memory plan costs and saves, in the loggers and in the progress bar.

It follows DeviceStatsMonitor: metrics go to every logger at the end of a training batch, every
`log_every_n_steps` steps, under the logger's own group separator. The class is built per Lightning package,
as the strategy is, but uses only what the Trainer hands it, so either Trainer can run it.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from lightning_offload.lightning_packages import current_package, import_from, package_of
from lightning_offload.plugins.memory import MemoryPlugin

if TYPE_CHECKING:
    from lightning.pytorch import Callback as _CallbackBase
    from lightning.pytorch import LightningModule, Trainer

    from lightning_offload.plugins.report import Report
else:
    _CallbackBase = object  # the real base comes from the package in use, see build_monitor

PREFIX = "offload"
_GIB = 2**30


class OffloadMonitorMixin(_CallbackBase):
    """Logs peak, budget, stall and the bytes kept, swapped and recomputed of the training steps.

    Loggers receive `offload/peak_bytes`, `offload/budget_bytes`, `offload/stall_seconds`,
    `offload/step_seconds`, `offload/kept_bytes`, `offload/swapped_bytes`, `offload/recomputed_bytes`,
    `offload/host_peak_bytes`; of the shapes of steps `offload/num_shapes`, `offload/num_at_first_sight` (planned from
    their first step on), `offload/num_deviations`, `offload/num_aligned` (under the plan for another structure),
    `offload/astray_bytes` (which these saved and it did not have) and `offload/planning_seconds`. The progress bar
    shows peak and budget in GiB and the stall in seconds. A value that is not known yet is left out.

    Args:
        progress_bar: Whether to show metrics in the progress bar too.

    Raises:
        MisconfigurationException: At fit start, if the Trainer's strategy is not an offload strategy, or if
            it has neither a logger nor a progress bar to write to.
    """

    def __init__(self, progress_bar: bool = True) -> None:
        super().__init__()
        self._progress_bar = progress_bar
        self._shown: dict[str, float] = {}

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Checks that there is something to monitor and somewhere to write."""
        if stage != "fit":
            return
        self._shown = {}
        if _memory_of(trainer) is None:
            raise _misconfiguration(
                trainer,
                f"Cannot use `OffloadMonitor` with the strategy `{type(trainer.strategy).__name__}`, which"
                " offloads nothing: use `Trainer(strategy=lightning_offload.OffloadStrategy(...))`.",
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
            self._shown = _bar_metrics(report)
            for logger in trainer.loggers:
                metrics = {f"{PREFIX}{logger.group_separator}{k}": v for k, v in _log_metrics(report).items()}
                logger.log_metrics(metrics, step=trainer.fit_loop.epoch_loop._batches_that_stepped)
        if self._shown and self._has_progress_bar(trainer):
            # repeated every batch: the bar drops what the last step did not log
            shown = {f"{PREFIX}/{name}": value for name, value in self._shown.items()}
            pl_module.log_dict(shown, prog_bar=True, logger=False, on_step=True, on_epoch=False, batch_size=1)

    def _has_progress_bar(self, trainer: Trainer) -> bool:
        return self._progress_bar and trainer.progress_bar_callback is not None


def _memory_of(trainer: Trainer) -> MemoryPlugin | None:
    memory = getattr(trainer.strategy, "memory", None)
    return memory if isinstance(memory, MemoryPlugin) else None


def _misconfiguration(trainer: Trainer, message: str) -> Exception:
    """Lightning's own exception, of the package that `trainer` comes from."""
    package = package_of(trainer) or current_package()
    error: Exception = import_from(package, "utilities.exceptions").MisconfigurationException(message)
    return error


def _log_metrics(report: Report) -> dict[str, float]:
    values: dict[str, float | None] = {
        "peak_bytes": report.measured_peak_bytes,
        "budget_bytes": report.budget_bytes,
        "stall_seconds": report.stall_seconds,
        "step_seconds": report.measured_step_seconds,
        "kept_bytes": report.kept_bytes,
        "swapped_bytes": report.swapped_bytes,
        "recomputed_bytes": report.recomputed_bytes,
        "host_peak_bytes": report.host_peak_bytes,
        "num_shapes": report.num_shapes,
        "num_at_first_sight": report.num_at_first_sight,
        "num_deviations": report.num_deviations,
        "num_aligned": report.num_aligned,
        "astray_bytes": report.astray_bytes,
        "planning_seconds": report.planning_seconds,
    }
    return {name: value for name, value in values.items() if value is not None}


def _bar_metrics(report: Report) -> dict[str, float]:
    values: dict[str, float | None] = {
        "peak_gib": _gib(report.measured_peak_bytes),
        "budget_gib": _gib(report.budget_bytes),
        "swapped_gib": _gib(report.swapped_bytes),
        "recomputed_gib": _gib(report.recomputed_bytes),
        "stall_s": report.stall_seconds,
    }
    return {name: value for name, value in values.items() if value is not None}


def _gib(num_bytes: int | None) -> float | None:
    return None if num_bytes is None else num_bytes / _GIB


@functools.cache
def build_monitor(package: str) -> type[OffloadMonitorMixin]:
    """Builds the class `OffloadMonitor` for the Lightning package `package`, importing it if need be."""
    base = import_from(package, "callbacks").Callback
    namespace = {
        # the public name, by which pickle and LightningCLI find the class
        "__module__": "lightning_offload",
        "__qualname__": "OffloadMonitor",
        "__doc__": OffloadMonitorMixin.__doc__,
    }
    built: type[OffloadMonitorMixin] = type(base)("OffloadMonitor", (OffloadMonitorMixin, base), namespace)
    return built
