"""The plan of a training run, told as Lightning's ModelSummary tells of the model.

`PlanSummary` says at fit start what the budget is, and prints the plan's table once, as soon as the plan is final: the
first steps record and measure, so at fit start there is no plan to print. It follows the Trainer's ModelSummary: rich
if that is rich, a log line if not, silent if there is none (enable_model_summary=False).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_offload.lightning_packages import import_from, rank_zero
from lightning_offload.plugins.announcing import budget_line, no_budget_line
from lightning_offload.plugins.report import TITLE, plan_rows
from lightning_offload.report.fields import Row, plain_table, rich_table

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from lightning_offload.plugins.memory import MemoryPlugin


class PlanSummary:
    """Says once per fit what the budget is and, later, what the plan is.

    Args:
        package: The Lightning package of `trainer`.
        memory: The plugin, attached.
        trainer: The Trainer that is about to fit.
    """

    def __init__(self, package: str, memory: MemoryPlugin, trainer: Trainer) -> None:
        self._package = package
        self._name = type(trainer.strategy).__name__
        self._memory = memory
        callbacks = import_from(package, "callbacks")
        installed: list[Any] = trainer.callbacks  # type: ignore[attr-defined]  # set by one of its connectors
        summaries = [cb for cb in installed if isinstance(cb, callbacks.ModelSummary)]
        self._visible = bool(summaries) and trainer.is_global_zero
        self._rich = any(isinstance(cb, callbacks.RichModelSummary) for cb in summaries)

    def announce(self) -> None:
        """Says what the budget is, or warns that there is none."""
        if self._memory.budget_bytes is None:
            rank_zero(self._package, "warn", no_budget_line(self._memory, self._name))
        elif self._visible:
            rank_zero(self._package, "info", budget_line(self._memory))

    def print_when_planned(self) -> bool:
        """Prints the table if the plan is final; true if there is nothing left to print."""
        if not self._visible or self._memory.budget_bytes is None:
            return True
        report = self._memory.report()
        if report.phase != "planned":
            return False
        self._print(plan_rows(report))
        return True

    def _print(self, rows: list[Row]) -> None:
        if self._rich:
            from rich import get_console

            get_console().print(rich_table(rows, TITLE))
        else:
            rank_zero(self._package, "info", f"\n{plain_table(rows, TITLE)}")
