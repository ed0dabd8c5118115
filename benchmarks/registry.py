"""The suites by name, imported when they are run."""

from __future__ import annotations

import importlib
from typing import Protocol, cast

from rich.progress import Progress

from benchmarks.results import Measurements, Options

SUITES = {
    "gpu": "benchmarks.suites.gpu",
    "links": "benchmarks.suites.links",
    "overhead": "benchmarks.suites.overhead",
}
"""Module of each suite."""


class Suite(Protocol):
    """What a suite's module provides; `STORES_ITSELF = True` besides, if it stores and tells as it goes."""

    TITLE: str

    def run(self, options: Options, progress: Progress) -> Measurements:
        """Measure and return the rows."""


def load_suite(name: str) -> Suite:
    """Import the suite `name`.

    Raises:
        ValueError: If there is no such suite.
    """
    if name not in SUITES:
        raise ValueError(f"unknown suite {name!r}; the suites are {', '.join(sorted(SUITES))}")
    return cast(Suite, importlib.import_module(SUITES[name]))
