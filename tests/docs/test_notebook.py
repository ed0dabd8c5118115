"""The notebook runs on a CPU, from its first cell to its last, and prints what is stored in it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.docs.blocks import shown
from tests.docs.notebook import NOTEBOOK, code_cells, printed_by, stored
from tests.one_thread import one_thread as one_thread


def test_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cell by cell; figures are those of one run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "88")
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    cells = code_cells(notebook)
    assert len(cells) > 4
    for i, (cell, text) in enumerate(zip(cells, printed_by(notebook), strict=True)):
        assert shown(text, is_exact=False) == shown(stored(cell), is_exact=False), f"cell {i + 1}"


def test_it_is_a_notebook() -> None:
    """With what Jupyter and viewers ask for."""
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert notebook["nbformat"] == 4
    assert notebook["metadata"]["kernelspec"]["language"] == "python"
    ids = [cell["id"] for cell in notebook["cells"]]
    assert len(set(ids)) == len(ids)
