"""Shows a result: tables on the console, a line in the log, the plots."""

from __future__ import annotations

import os
from typing import Any

from lightning_offload.callbacks.tuning.result import TuningResult
from lightning_offload.callbacks.tuning.table import scaling_table, summary, trials_table
from lightning_offload.lightning_packages import rank_zero

__all__ = ["show"]


def show(result: TuningResult, trainer: Any, package: str, plot_dir: str | os.PathLike[str] | None) -> None:
    """Show a result, on rank zero.

    Args:
        result: What was found.
        trainer: Of the fit.
        package: The Lightning package of it.
        plot_dir: Folder for the plots; None for none.
    """
    if not trainer.is_global_zero:
        return
    from rich import get_console

    get_console().print(trials_table(result))
    if result.scaling is not None:
        get_console().print(scaling_table(result.scaling))
    rank_zero(package, "info", f"Continuing with {summary(result)}")
    if plot_dir is not None:
        from lightning_offload.callbacks.tuning.plotting import save_plots

        save_plots(result, plot_dir, package)
