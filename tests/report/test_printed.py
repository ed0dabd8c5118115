"""Results show themselves: printed, by rich, and in a notebook."""

from __future__ import annotations

import io
import os
import subprocess
import sys

import pytest
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightning_offload.report import render_text
from lightning_offload.report.fields import plain_table, rich_table
from lightning_offload.report.printed import Printed, PrintedTables
from tests.report.steps import CARD, MIXED, SIX, plan_of


class Result(Printed):
    """Has a name that looks like HTML and like markup."""

    def __rich__(self) -> Table:
        return rich_table([("Budget", "12.0 GiB"), ("Name", "[bold]<b>")], "A result")


def test_print_shows_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """As rich does on a console of the terminal's width, without its colours; the repr is another thing."""
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("FORCE_COLOR", "1")
    out = io.StringIO()
    Console(file=out, width=60, color_system=None).print(Result())
    assert str(Result()) == out.getvalue().rstrip()
    assert "│ Name     │ [bold]<b> │" in str(Result())
    assert "Budget" not in repr(Result())


def test_where_output_is_no_unicode() -> None:
    """Tables are drawn in ASCII, and what has no letter there is a question mark, not an error."""
    code = (
        "from lightning_offload.report.fields import rich_table; from lightning_offload.report.printed import "
        "PrintedTables; print(PrintedTables(rich_table([('long…name', '1')], 'title')))"
    )
    done = subprocess.run(
        [sys.executable, "-X", "utf8=0", "-c", code], capture_output=True, text=True, check=True, timeout=100,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )  # fmt: skip
    assert "| long?name | 1 |" in done.stdout
    assert done.stdout.isascii()


def test_a_notebook_shows_html() -> None:
    """With what looks like HTML escaped."""
    shown = Result()._repr_html_()
    assert shown.startswith("<pre style=")
    assert "12.0 GiB" in shown
    assert "[bold]&lt;b&gt;" in shown
    assert "<b>" not in shown


def test_tables_of_a_plan_print_too() -> None:
    """What render_text returns, in its parts."""
    shown = render_text(SIX, plan_of(SIX, MIXED, budget_bytes=600), CARD)
    text = str(shown)
    assert "Policy auto within 600 B on a card" in text
    assert "What each module saved" in text
    assert "What each module saved" in shown._repr_html_()
    assert str(PrintedTables(Text("one"), Text("two"))) == "one\ntwo"


def test_rows_in_a_log() -> None:
    """Two columns and a title, without rich."""
    lines = plain_table([("Budget", "12.0 GiB"), ("Policy", "auto")], "Plan").splitlines()
    assert lines == [
        "Plan   |", "-----------------", "Budget | 12.0 GiB", "Policy |     auto", "-----------------"
    ]  # fmt: skip
