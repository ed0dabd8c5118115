"""``demo``: a real training, plain and within a budget, compared bit by bit.

The demo is no part of the package: it is ``examples/demo`` of the checkout that the package is imported from, or of the
one whose root is the current folder.
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
from pathlib import Path
from types import ModuleType

import lightning_offload
from lightning_offload.cli.output import console, note, write_json
from lightning_offload.errors import UnsupportedError

FAILED = 1
_DEMO = "examples.demo.program"


def demo(output: Path | None, *, as_json: bool) -> int:
    """Run the demo and print its figures.

    Args:
        output: The folder where the saved states, summary.json and the page stay; None for nowhere.
        as_json: Whether to print JSON in place of a table.

    Returns:
        The exit code: 1 if training was not identical, or not within the budget.

    Raises:
        OffloadError: There is no demo here, scikit-learn is not installed, the folder cannot be used, or a setting is
            wrong.
    """
    from rich.console import Console

    program = _program()
    try:
        summary = program.run_demo(program.DemoConfig(), output, Console(stderr=True) if as_json else console())
    except program.DemoError as error:
        note(f"error: the demo failed: {error}")
        return FAILED
    if as_json:
        write_json(dataclasses.asdict(summary))
    return 0


def _program() -> ModuleType:
    """The demo's program.

    Raises:
        UnsupportedError: There is no checkout here.
    """
    roots = dict.fromkeys([str(Path(lightning_offload.__file__).resolve().parents[1]), str(Path.cwd())])
    for root in roots:
        if Path(root, *_DEMO.split(".")).with_suffix(".py").is_file():
            sys.path.insert(0, root)  # before a package of somebody else's that has the name
            return importlib.import_module(_DEMO)
    raise UnsupportedError(
        f"there is no folder examples/demo in {' or '.join(map(repr, roots))}: the demo comes with the sources, not "
        "with a wheel; clone the repository and run `make demo` in it"
    )
