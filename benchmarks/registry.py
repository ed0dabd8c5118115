"""The suites by name, imported when they are run."""

from __future__ import annotations

import importlib
from typing import Protocol, cast

from rich.progress import Progress

from benchmarks.results import Measurements, Options

SUITES = {
    "calibration": "benchmarks.suites.calibration",
    "clients": "benchmarks.suites.clients",
    "gpu": "benchmarks.suites.gpu",
    "host": "benchmarks.suites.host",
    "links": "benchmarks.suites.links",
    "overhead": "benchmarks.suites.overhead",
    "papers": "benchmarks.suites.papers",
    "peers": "benchmarks.suites.peers",
    "planner": "benchmarks.suites.planner",
    "shapes": "benchmarks.suites.shapes",
    "tuner": "benchmarks.suites.tuner",
}
"""Module of each suite."""


class Suite(Protocol):
    """What a suite's module provides.

    It may provide besides: `STORES_ITSELF = True`, if it stores and tells as it goes; `table(measurements)`, what a
    terminal is shown; `DOCUMENT` and `page(result)`, a document of its own below docs and how it is made;
    `short_table(result)`, what other documents show of it.
    """

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
