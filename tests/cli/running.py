"""Runs commands in this process."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from lightning_offload import cli

SMALL = ["tests.cli.models:small", "--input", "3x32x32", "--batch-size", "8", "--device", "k40c"]
"""A small net on an old GPU: plain peak 2.8 MiB, floor about a third of it."""
Run = Callable[[Sequence[str]], int]
"""Runs a command line, those of the package where no other is given; its exit code."""


def output_of(capsys: pytest.CaptureFixture[str], *arguments: str, run: Run = cli.run) -> str:
    """What a command that succeeds prints; nothing on standard error."""
    assert run(arguments) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def json_of(capsys: pytest.CaptureFixture[str], *arguments: str, run: Run = cli.run) -> dict[str, Any]:
    """The JSON that a command prints."""
    found: dict[str, Any] = json.loads(output_of(capsys, *arguments, "--json", run=run))
    return found


def refused(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 2, run: Run = cli.run) -> str:
    """The one line that a command line which cannot be served ends with."""
    assert run(arguments) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("lightning-offload: error: ")
    return err


def rows_of(out: str) -> list[list[str]]:
    """Cells of the tables with borders in an output, headers aside."""
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if "│" in line]


def option(name: str, value: str, arguments: Sequence[str] = SMALL) -> list[str]:
    """Arguments with another value of an option."""
    changed = list(arguments)
    changed[changed.index(name) + 1] = value
    return changed
