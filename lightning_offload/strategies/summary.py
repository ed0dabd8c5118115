"""The plan of a training run as one table, in the style of Lightning's ModelSummary.

`summary_rows` turns a report into text, `plain_table` lays the rows out for a log and `rich_table` for a
terminal. What a report does not know is left out. `PlanSummary` says at fit start what the budget is, and
prints the table once, as soon as the plan is final: the first steps record and measure, so at fit start there
is no plan to print. It follows the Trainer's ModelSummary: rich if that is rich, a log line if not, silent if
there is none (enable_model_summary=False).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_offload.lightning_packages import import_from, rank_zero
from lightning_offload.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from rich.table import Table

    from lightning_offload.plugins.memory import MemoryPlugin
    from lightning_offload.plugins.report import Report

TITLE = "Offload plan"
Row = tuple[str, str]


def summary_rows(report: Report) -> list[Row]:
    """Describes the plan in `report`, one (label, value) pair per line, unknown values left out."""
    rows = [
        ("Budget", _bytes(report.budget_bytes)),
        ("Smallest feasible budget", _bytes(report.floor_bytes)),
        ("Peak without a plan", _bytes(report.plain_peak_bytes)),
        ("Peak predicted", _bytes(report.predicted_peak_bytes)),
        ("Peak measured", _bytes(report.measured_peak_bytes)),
        ("Kept on the device", _bytes(report.kept_bytes)),
        ("Swapped", _bytes(report.swapped_bytes)),
        ("Recomputed", _bytes(report.recomputed_bytes)),
        ("Step predicted", _step(report)),
        ("Step, lower bound", _seconds(report.bound_seconds)),
        ("Policy", report.policy),
    ]
    return [(label, value) for label, value in rows if value]


def plain_table(rows: list[Row]) -> str:
    """Lays `rows` out as text, as ModelSummary does without rich."""
    left = max(len(TITLE), *(len(label) for label, _ in rows))
    right = max(len(value) for _, value in rows)
    rule = "-" * (left + 3 + right)
    lines = [f"{label:<{left}} | {value:>{right}}" for label, value in rows]
    return "\n".join([f"{TITLE:<{left}} | {'':>{right}}".rstrip(), rule, *lines, rule])


def rich_table(rows: list[Row]) -> Table:
    """Lays `rows` out as a rich table, as RichModelSummary does."""
    from rich.table import Table

    table = Table(header_style="bold magenta")
    table.add_column(TITLE, no_wrap=True)
    table.add_column("", justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


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
        budget_bytes, device = self._memory.budget_bytes, self._memory.device
        if budget_bytes is None:
            rank_zero(
                self._package,
                "warn",
                f"{self._name} has no budget and the memory of the device '{device}' is not limited: every tensor"
                f" is kept. Pass a budget, such as {self._name}(budget='4GiB').",
            )
        elif self._visible:
            budget = format_bytes(budget_bytes)
            rank_zero(self._package, "info", f"Offload budget: {budget} on {device}, planned in the first steps")

    def print_when_planned(self) -> bool:
        """Prints the table if the plan is final; true if there is nothing left to print."""
        if not self._visible or self._memory.budget_bytes is None:
            return True
        report = self._memory.report()
        if report.phase != "planned":
            return False
        self._print(summary_rows(report))
        return True

    def _print(self, rows: list[Row]) -> None:
        if self._rich:
            from rich import get_console

            get_console().print(rich_table(rows))
        else:
            rank_zero(self._package, "info", f"\n{plain_table(rows)}")


def _bytes(value: int | None) -> str:
    return "" if value is None else format_bytes(value)


def _seconds(value: float | None) -> str:
    return "" if value is None else format_seconds(value)


def _step(report: Report) -> str:
    """The predicted step time with what the plan adds to the plain step."""
    predicted, plain = report.predicted_step_seconds, report.plain_step_seconds
    if predicted is None or not plain:
        return _seconds(predicted)
    return f"{format_seconds(predicted)} ({predicted / plain - 1:+.1%})"
