"""Runs docs/notebook.ipynb. `python -m tests.docs.notebook` stores in it what its cells print.

Its cells print text and nothing else, so that neither Jupyter nor a kernel is needed to run it.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
from typing import Any

from tests.docs.blocks import ROOT

NOTEBOOK = ROOT / "docs/notebook.ipynb"


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    """The cells that are run."""
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def stored(cell: dict[str, Any]) -> str:
    """What a cell printed when it was stored."""
    return "".join("".join(output["text"]) for output in cell["outputs"])


def printed_by(notebook: dict[str, Any]) -> list[str]:
    """Run the cells, one after another, and return what each prints."""
    names: dict[str, Any] = {}
    found = []
    for i, cell in enumerate(code_cells(notebook)):
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile("".join(cell["source"]), f"{NOTEBOOK.name}, cell {i + 1}", "exec"), names)
        found.append("".join(line.rstrip() + "\n" for line in out.getvalue().splitlines()))
    return found


def main() -> None:
    """Store what the cells print."""
    os.environ["COLUMNS"] = "88"
    notebook: dict[str, Any] = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    for i, (cell, text) in enumerate(zip(code_cells(notebook), printed_by(notebook), strict=True)):
        lines = text.splitlines(keepends=True)
        cell["outputs"] = [{"name": "stdout", "output_type": "stream", "text": lines}] if lines else []
        cell["execution_count"] = i + 1
    NOTEBOOK.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
