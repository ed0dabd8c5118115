"""docs/troubleshooting.md names messages that there are."""

from __future__ import annotations

import ast
import inspect
import re

from lightning_offload import errors
from tests.docs.blocks import ROOT

PAGE = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
SYMPTOMS = {"the first steps are slow", "`nvidia-smi` shows more than the budget"}
"""Entries that are no messages."""


def entries() -> list[str]:
    """The first cells of its tables' rows."""
    rows = [line.split(" | ")[0].removeprefix("| ") for line in PAGE.splitlines() if line.startswith("| ")]
    return [row for row in rows if row not in {"message", "symptom"} | SYMPTOMS]


def literals() -> list[str]:
    """All texts in the package's source, with a mark where a value is put in."""
    found = []
    for path in (ROOT / "lightning_offload").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = (part.value if isinstance(part, ast.Constant) else "\0" for part in node.values)
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def test_messages_are_in_the_source() -> None:
    """Each piece between the dots of a message is text of the package, none of it made up."""
    assert len(entries()) > 80
    source = "\n\n".join(re.sub(r"%(s|d|r)", "\0", text) for text in literals())
    for entry in entries():
        messages = re.findall(r"`([^`]*)`", entry)
        assert messages, entry
        for message in messages:
            pieces = [piece.strip() for piece in re.split(r"\.\.\.", message) if len(piece.strip()) > 2]
            if not re.fullmatch(r"\w+Error", message):
                assert pieces, message
                assert [piece for piece in pieces if piece not in source] == [], message


def test_every_error_is_on_the_page() -> None:
    """By its name, and the names that it has for those are true."""
    names = {name for name, value in inspect.getmembers(errors, inspect.isclass) if value.__module__ == errors.__name__}
    assert {name for name in names if name not in PAGE} == set()
    ours = set(re.findall(r"`(\w+Error)`", PAGE)) - {
        "ValueError",
        "OSError",
        "RuntimeError",
        "TypeError",
        "OutOfMemoryError",
    }
    assert ours <= names
