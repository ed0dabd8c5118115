"""``demo``: a real training, plain and within a budget, compared bit by bit."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from lightning_offload.cli.output import console, note, write_json

FAILED = 1


def demo(output: Path | None, *, as_json: bool) -> int:
    """Run the demo and print its figures.

    Args:
        output: The folder where the saved states, summary.json and the page stay; None for nowhere.
        as_json: Whether to print JSON in place of a table.

    Returns:
        The exit code: 1 if training was not identical, or not within the budget.

    Raises:
        OffloadError: scikit-learn is not installed, the folder cannot be used, or a setting is wrong.
    """
    from rich.console import Console

    from lightning_offload.demo.program import DemoError, run_demo
    from lightning_offload.demo.training import DemoConfig

    try:
        summary = run_demo(DemoConfig(), output, Console(stderr=True) if as_json else console())
    except DemoError as error:
        note(f"error: the demo failed: {error}")
        return FAILED
    if as_json:
        write_json(dataclasses.asdict(summary))
    return 0
