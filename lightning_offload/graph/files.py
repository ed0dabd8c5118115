"""Reads the files that plans, steps and devices are in: text of a size that such a file can have."""

from __future__ import annotations

import os
from pathlib import Path

from lightning_offload.units import format_bytes

__all__ = ["MAX_FILE_BYTES", "read_file", "sibling_graph"]

MAX_FILE_BYTES = 256 << 20
"""A step of 10,000 ops takes a few MB. What is larger was not written by this package, and is not read into memory."""


def sibling_graph(path: str | os.PathLike[str]) -> Path:
    """Where the step of a plan is unless it was put elsewhere: plan.json and plan.graph.json."""
    return Path(path).with_suffix(".graph.json")


def read_file(path: str | os.PathLike[str]) -> str:
    """The text of a file.

    Raises:
        OSError: It cannot be opened or read.
        ValueError: It is larger than :data:`MAX_FILE_BYTES`, or no UTF-8.
    """
    with Path(path).open("rb") as file:
        found = file.read(MAX_FILE_BYTES + 1)
    if len(found) > MAX_FILE_BYTES:
        raise ValueError(f"it has more than {format_bytes(MAX_FILE_BYTES)}, the most that is read")
    return found.decode("utf-8")
