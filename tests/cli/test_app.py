"""The command line as a whole: help, exit codes, and what it imports."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import lightning_offload
from lightning_offload import cli
from lightning_offload.cli import app
from lightning_offload.errors import BudgetInfeasibleError, PlanError
from lightning_offload.planning.planner import POLICIES
from tests.cli.running import output_of, refused
from tests.test_lean_import import run_python

COMMANDS = {
    "demo": ["--output", "--json"],
    "plan": ["--input", "--batch-size", "--budget", "--device", "--dtype", "--report", "--trace", "--json"],
    "max-batch": ["--limit", "--tolerance", "--only-max", "--json"],
    "compare": ["--budget", "--json"],
    "explain": ["--graph", "--model", "--json"],
    "devices": ["--json"],
    "build-native": ["--force", "--in-package", "--json"],
    "bench-links": ["--device", "--spill-dir", "--size", "--json"],
}


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a command they are listed; the exit codes are documented."""
    monkeypatch.setenv("COLUMNS", "160")
    out = output_of(capsys)
    assert all(command in out for command in COMMANDS)
    assert "Exit codes: 0 done" in out
    assert "3 no plan meets the budget" in out


def test_help_lists_the_options(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests
) -> None:
    """Each command lists its options and the exit codes."""
    for command in COMMANDS:
        with subtests.test(command=command):
            monkeypatch.setenv("COLUMNS", "160")
            out = output_of(capsys, command, "--help")
            assert all(word in out for word in COMMANDS[command])
            assert "2 bad input" in out


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    """Of the package, on a line of its own."""
    assert output_of(capsys, "--version") == f"lightning-offload {lightning_offload.__version__}\n"


@pytest.mark.parametrize("command", ["plan", "max-batch"])
def test_help_lists_the_policies(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them, in the planner's order, written out where no planner is imported."""
    monkeypatch.setenv("COLUMNS", "160")
    words = re.sub(r"[^\w,.:-]+", " ", output_of(capsys, command, "--help"))
    assert f"Who plans: {', '.join(POLICIES)}. " in words


def test_an_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    """A command that does not exist is bad input."""
    assert "No such command 'bench-link'" in refused(capsys, "bench-link")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (BudgetInfeasibleError("too\nsmall", budget_bytes=1, floor_bytes=2, op=""), 3),
        (PlanError("bad plan"), 2),
    ],
)
def test_exit_codes(
    error: Exception, code: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a command raises on purpose decides the exit code; the message is one line."""

    def fail(*, as_json: bool) -> None:
        raise error

    monkeypatch.setattr("lightning_offload.cli.devices.devices", fail)
    assert str(error).replace("\n", " ") in refused(capsys, "devices", code=code)


def test_an_interrupt(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C ends a command without a traceback."""

    def fail(*, as_json: bool) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("lightning_offload.cli.devices.devices", fail)
    assert cli.run(["devices"]) == app.ABORTED
    assert "Traceback" not in capsys.readouterr().err


def test_a_bug_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception that is nobody's input keeps its traceback."""

    def fail(*, as_json: bool) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("lightning_offload.cli.devices.devices", fail)
    with pytest.raises(ZeroDivisionError):
        cli.run(["devices"])


def test_main_exits_with_the_code(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The console script, and python -m, read the process's arguments and end it."""
    monkeypatch.setattr(sys, "argv", ["lightning-offload", "bench-links", "--size", "1"])
    for start in (cli.main, lambda: runpy.run_module("lightning_offload.cli", run_name="__main__")):
        with pytest.raises(SystemExit) as exit_info:
            start()
        assert exit_info.value.code == app.BAD_INPUT
        assert "--size '1'" in capsys.readouterr().err


def test_without_typer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """One line names the extra to install."""
    monkeypatch.setitem(sys.modules, "typer", None)
    assert cli.run(["bench-links"]) == app.NOT_INSTALLED
    assert capsys.readouterr().err.strip().endswith("pip install 'lightning-offload[cli]'")


def test_asking_for_help_imports_no_torch() -> None:
    """The command line answers at once, bad input included; what a command needs is imported when it runs."""
    out = run_python("""
        import sys
        from lightning_offload import cli
        assert "typer" not in sys.modules and "rich" not in sys.modules
        cli.run(["plan", "--help"])
        cli.run(["bench-links", "--size", "1"])
        cli.run(["plan", "a:b", "--device", "abacus"])
        cli.run(["plan", "a:b", "--batch-size", "0"])
        print("torch" in sys.modules)
    """)
    assert out.strip().endswith("False")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_terminal_that_does_not_know_each_letter(encoding: str) -> None:
    """Help is printed all the same."""
    environment = {**os.environ, "PYTHONIOENCODING": encoding, "PYTHONUTF8": "0"}
    command = [sys.executable, "-m", "lightning_offload.cli", "plan", "--help"]
    done = subprocess.run(command, env=environment, capture_output=True, check=False)
    assert done.returncode == 0
    assert b"--host-budget" in done.stdout
    assert done.stderr == b""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no device that is always full")
@pytest.mark.parametrize("options", [["--json"], []])
def test_a_full_disk_behind_the_output(options: list[str]) -> None:
    """One line says so."""
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "lightning_offload.cli", "devices", *options]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "lightning-offload: error: the output cannot be written: No space left on device\n"


@pytest.mark.parametrize("options", [["--json"], []])
def test_a_reader_that_has_seen_enough(options: list[str]) -> None:
    """That is no error."""
    command = [sys.executable, "-m", "lightning_offload.cli", "devices", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        running.stdout.close()
        assert running.stderr.read() == b""
    assert running.returncode == 0
