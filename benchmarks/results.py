"""What a suite measured: rows in memory, one JSON line for programs, one file per suite and device on disk.

The line is `{"suite", "device", "rows": [{"case", "metric", "value", "goal"}]}`; a goal is the largest value
that is good enough, or null for figures that are there to be read. A metric `x` with rows `x_low` and
`x_high` has a 95% interval. Names end in their units, `_bytes` and `_seconds`. The metric `error` says that its
case could not be measured; the reason stands in the file's `notes`.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

RESULTS_FOLDER = Path(__file__).resolve().parent / "results"
ERROR = "error"
"""Metric of a row that stands for a failure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How a suite is run.

    Attributes:
        quick: Tiny models and few repeats, to try the harness; the figures mean nothing and are never stored.
        num_pairs: Pairs of steps per comparison.
        device: Where to measure; None for the GPU if there is one.
        minutes: When a suite that can go on later must have ended; None for its usual limit.
        cases: Which cases of such a suite to run, by name or pattern; all without any.
        fresh: Whether cases that were measured before are measured again.
        folder: Where the result is stored; None for the usual place.
    """

    quick: bool = False
    num_pairs: int = 30
    device: str | None = None
    minutes: float | None = None
    cases: tuple[str, ...] = ()
    fresh: bool = False
    folder: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One figure.

    Attributes:
        case: What was measured, on what.
        metric: Name of the figure, ending in its unit.
        value: The figure.
        goal: Largest value that is good enough; None if the figure is for reading.
    """

    case: str
    metric: str
    value: float
    goal: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """What a suite returns.

    Attributes:
        rows: All figures, those of one case together.
        config: Sizes and settings that the figures depend on, ready for JSON.
        repeats: Repeats per comparison.
        spread: For each case and series the quartiles of its single measurements.
        notes: What a reader of a case has to know, above all why it could not be measured.
    """

    rows: Sequence[Row]
    config: dict[str, Any]
    repeats: int
    spread: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)


def together(parts: Mapping[str, Measurements]) -> Measurements:
    """Put what was measured in parts together: repeats are the fewest, configurations go by the parts' names."""
    return Measurements(
        rows=[row for part in parts.values() for row in part.rows],
        config={name: part.config for name, part in parts.items() if part.config},
        repeats=min((part.repeats for part in parts.values() if part.repeats), default=0),
        spread={case: series for part in parts.values() for case, series in part.spread.items()},
        notes={case: note for part in parts.values() for case, note in part.notes.items()},
    )


def error_row(case: str) -> Row:
    """Return the row that says that a case could not be measured."""
    return Row(case=case, metric=ERROR, value=1.0)


def json_line(suite: str, device: str, rows: Sequence[Row]) -> str:
    """Return the one-line JSON object that ends the output of every `--json` run."""
    return json.dumps({"suite": suite, "device": device, "rows": [asdict(row) for row in rows]})


def result_path(suite: str, device: str, folder: Path = RESULTS_FOLDER) -> Path:
    """Return where the result of `suite` on `device` is stored."""
    slug = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    return folder / f"{suite}-{slug}.json"


def write_result(
    path: Path, suite: str, device: str, measurements: Measurements, environment: dict[str, Any], **more: Any
) -> None:
    """Write a result with all that is needed to read it later, as a whole or not at all.

    Args:
        path: The file.
        suite: Name of the suite.
        device: What was measured.
        measurements: What came out.
        environment: Versions and the like.
        more: What else a suite keeps there.
    """
    content = {
        "suite": suite,
        "device": device,
        "environment": environment,
        "config": measurements.config,
        "repeats": measurements.repeats,
        "rows": [asdict(row) for row in measurements.rows],
        "spread": measurements.spread,
        **({"notes": measurements.notes} if measurements.notes else {}),
        **more,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".part")
    unfinished.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    unfinished.replace(path)


def draw_stored(suite: str, draw: Callable[[dict[str, Any]], list[Path]]) -> int:
    """Draw the pictures of a suite's stored result; returns an exit status.

    Args:
        suite: Which; what it measured on a CPU is drawn.
        draw: Draws the pictures of a result's config and returns where they are.
    """
    path = result_path(suite, "cpu")
    if not path.exists():
        print(f"error: there is no {path}: run `python -m benchmarks {suite}` first", file=sys.stderr)
        return 2
    for drawn in draw(json.loads(path.read_text(encoding="utf-8"))["config"]):
        print(f"wrote {drawn}")
    return 0
