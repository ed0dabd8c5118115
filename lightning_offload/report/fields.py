"""Labels and what they stand for as one table: `plain_table` for a log, `rich_table` for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["Row", "plain_table", "rich_table"]

Row = tuple[str, str]
"""A label, and its value as text."""


def plain_table(rows: Sequence[Row], title: str) -> str:
    """Lay rows out as text, as ModelSummary does without rich."""
    left = max(len(title), *(len(label) for label, _ in rows))
    right = max(len(value) for _, value in rows)
    rule = "-" * (left + 3 + right)
    lines = [f"{label:<{left}} | {value:>{right}}" for label, value in rows]
    return "\n".join([f"{title:<{left}} |", rule, *lines, rule])


def rich_table(rows: Sequence[Row], title: str) -> Table:
    """Lay rows out as a rich table, as RichModelSummary does."""
    from rich.table import Table
    from rich.text import Text

    table = Table(header_style="bold magenta")
    table.add_column(title, no_wrap=True)
    table.add_column("", justify="right", overflow="fold")
    for label, value in rows:
        table.add_row(label, Text(value))
    return table
