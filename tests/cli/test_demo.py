"""The command `demo`: the demo's program with its figures as a table or as JSON; what failed is one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_offload import cli
from lightning_offload.demo import program, training
from lightning_offload.demo.program import DemoError
from tests.demo.test_demo import SMALL


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo is a small one."""
    monkeypatch.setattr(training, "DemoConfig", lambda: SMALL)


def test_it_trains_and_compares(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With --json the figures alone are on standard output, and the same ones are in the folder."""
    assert cli.run(["demo", "--json", "--output", str(tmp_path / "new" / "folder")]) == 0
    out, err = capsys.readouterr()
    figures = json.loads(out)
    assert figures["identical"] is True
    assert figures == json.loads((tmp_path / "new" / "folder" / "summary.json").read_text())
    assert "BatchNorm statistics" in err


def test_a_failed_demo_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The exit code is 1."""

    def fail(*_: Any) -> None:
        raise DemoError("not the same bits")

    monkeypatch.setattr(program, "run_demo", fail)
    assert cli.run(["demo"]) == 1
    assert capsys.readouterr() == ("", "lightning-offload: error: the demo failed: not the same bits\n")


def test_bad_input_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder that is a file: the exit code is 2."""
    (tmp_path / "file").write_text("")
    assert cli.run(["demo", "--output", str(tmp_path / "file")]) == 2
    assert "file' cannot be used: File exists; name another one" in capsys.readouterr().err
