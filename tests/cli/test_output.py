"""Progress is for people at a terminal."""

from __future__ import annotations

import pytest

from lightning_offload.cli.output import progress


def test_progress_is_for_terminals(capsys: pytest.CaptureFixture[str]) -> None:
    """Where standard error is no terminal, nothing is written to it."""
    with progress("working") as tell:
        tell("more")
    assert capsys.readouterr() == ("", "")
