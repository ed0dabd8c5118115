"""The command `demo`: the checkout's demo with its figures as a table or as JSON; what failed is one line."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import lightning_offload
from examples.demo import program
from examples.demo.program import DemoError
from lightning_offload import cli
from tests.cli.running import refused
from tests.examples.demo.test_demo import SMALL

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo is a small one, and the search path is put back."""
    monkeypatch.setattr(program, "DemoConfig", lambda: SMALL)
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The package lies in another folder than the demo, which is returned."""
    monkeypatch.setattr(lightning_offload, "__file__", str(tmp_path / "lightning_offload/__init__.py"))
    return tmp_path


def test_it_trains_and_compares(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With --json the figures alone are on standard output, and the same ones are in the folder; from any folder."""
    monkeypatch.chdir(tmp_path)
    assert cli.run(["demo", "--json", "--output", str(tmp_path / "new" / "folder")]) == 0
    out, err = capsys.readouterr()
    figures = json.loads(out)
    assert figures["identical"] is True
    assert figures == json.loads((tmp_path / "new" / "folder" / "summary.json").read_text())
    assert "BatchNorm statistics" in err


def test_without_a_checkout(
    installed: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both places that were looked at are named, and how to get the demo."""
    here = installed / "here"
    (here / "examples").mkdir(parents=True)  # somebody else's
    monkeypatch.chdir(here)
    assert refused(capsys, "demo") == (
        f"lightning-offload: error: there is no folder examples/demo in '{installed}' or '{here}': "
        "the demo comes with the sources, not with a wheel; clone the repository and run `make demo` in it\n"
    )


@pytest.mark.usefixtures("installed")
def test_a_failed_demo_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The exit code is 1; here the demo is found in the current folder."""
    monkeypatch.chdir(ROOT)

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
