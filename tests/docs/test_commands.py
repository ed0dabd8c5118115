"""What the pages show in a terminal is what the commands print, and every command on them exists."""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.scale import __main__ as scale
from lightning_offload import cli
from tests.docs.blocks import PAGES, ROOT, Block, blocks_of, commands_of, name_of, shown
from tests.one_thread import one_thread as one_thread
from tests.shares import is_all

SLOW = ("max-batch", "compare")
"""Commands of tens of seconds, which run where nothing is left out."""

RUNS = {"lightning-offload": cli.run, "python -m benchmarks.scale": scale.main}
"""Command lines whose output pages show, by how they begin."""

SESSIONS = [
    (page, block)
    for page in PAGES
    for block in blocks_of(page)
    if block.language == "console" and block.text.startswith(tuple(f"$ {program} " for program in RUNS))
]
COMMANDS = [(name_of(page), command) for page in PAGES for command in commands_of(page)]
IS_PINNED = f"torch=={torch.__version__.split('+')[0]}\n" in (ROOT / "constraints.txt").read_text(encoding="utf-8")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


def is_slow(block: Block) -> bool:
    return any(f"$ lightning-offload {name} " in block.text for name in SLOW)


@pytest.mark.skipif(not IS_PINNED, reason="what is shown was printed with the torch of constraints.txt")
@pytest.mark.parametrize(
    "block",
    [
        pytest.param(block, id=f"{name_of(page)}:{block.line}")
        for page, block in SESSIONS
        if is_all() or not is_slow(block)
    ],
)
def test_sessions(
    block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Commands of the package, run one after another in a folder, print what is shown; so does `echo $?`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "88")
    code = 0
    for command, expected in re.findall(r"^\$ ((?:.*\\\n)*.*)\n((?:(?!\$ ).*\n)*)", block.text, re.MULTILINE):
        if command == "echo $?":
            assert expected == f"{code}\n"
            continue
        (program,) = (program for program in RUNS if command.startswith(f"{program} "))
        capsys.readouterr()
        code = RUNS[program](shlex.split(command.removeprefix(program).replace("\\\n", " ")))
        out, err = capsys.readouterr()
        printed = shown(out + (err if code else ""), is_exact=True)
        pattern = re.escape(shown(expected, is_exact=True)).replace(re.escape("..."), r"(.*\n)*?.*?")
        assert re.fullmatch(f"{pattern}\n*", printed), printed


def test_there_are_sessions() -> None:
    """Of the command line, and of many devices."""
    assert {name_of(page) for page, _ in SESSIONS} == {"docs/cli.md", "docs/scale.md"}


@pytest.mark.filterwarnings("ignore:Setuptools is replacing distutils")  # whoever else imported it first
def test_modules_and_targets_exist() -> None:
    """Modules that Python is told to run can be found, and make has the targets."""
    text = {name_of(page): page.read_text(encoding="utf-8") for page in PAGES}
    modules = {(page, name) for page in text for name in re.findall(r"python -m ([\w.]*\w)", text[page])}
    modules |= {(page, name) for page, line in COMMANDS for name in re.findall(r"torchrun .*-m ([\w.]+)", line)}
    targets = {(page, name) for page, line in COMMANDS for name in re.findall(r"^make ([a-z-]+)", line)}
    assert len(modules) > 5
    assert len(targets) > 3
    assert [found for found in sorted(modules) if importlib.util.find_spec(found[1]) is None] == []
    assert [found for found in sorted(targets) if not re.search(f"^{found[1]}:", MAKEFILE, re.MULTILINE)] == []


def test_options_exist() -> None:
    """Each command of the package has the options that it is given."""
    import typer

    from benchmarks.scale.command import build_app as build_scale
    from lightning_offload.cli.commands import build_app

    own: Any = typer.main.get_command(build_app())
    commands = {f"lightning-offload {name}": command for name, command in own.commands.items()}
    commands["python -m benchmarks.scale"] = typer.main.get_command(build_scale())
    lines = [line for _, line in COMMANDS if line.startswith(tuple(RUNS)) and not line.endswith("--version")]
    assert len(lines) > 5
    for line in lines:
        (command,) = (command for start, command in commands.items() if f"{line} ".startswith(f"{start} "))
        there = {option for parameter in command.params for option in parameter.opts}
        assert {word.split("=")[0] for word in shlex.split(line) if word.startswith("--")} <= there, line
