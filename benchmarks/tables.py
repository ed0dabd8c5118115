"""Tables for the documentation, written from the stored results and never by hand.

`docs/performance.md` is written as a whole, and so is the document of a suite that has one of its own: the file
`DOCUMENT` of docs, made by its `page(result)`. README.md and the other pages of docs may hold a short table of a result
between two marker lines, `<!-- benchmark: overhead-cpu -->` and `<!-- end -->`, with the name of the result file: what
the suite's `short_table(result)` makes of it, or its figures with a goal or an interval.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.registry import load_suite
from benchmarks.results import ERROR, RESULTS_FOLDER, Row
from lightning_offload.units import format_bytes, format_seconds

_CHECKOUT = Path(__file__).resolve().parents[1]
_INTRODUCTION = """# Performance

Written by `python -m benchmarks tables` from `benchmarks/results/`; do not edit. A goal is the largest value
that is good enough; figures without one are there to be read. Intervals are 95% bootstrap intervals of the
median of interleaved pairs.
"""
_MARKED = re.compile(r"(<!-- benchmark: (?P<name>[\w.-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def write_documents(root: Path = _CHECKOUT, results: Path = RESULTS_FOLDER) -> list[Path]:
    """Write the documents below docs and fill the marked places of README.md; returns the files written."""
    performance = root / "docs" / "performance.md"
    performance.parent.mkdir(parents=True, exist_ok=True)
    performance.write_text(performance_page(results), encoding="utf-8")
    written = [performance]
    for name, text in own_documents(results).items():
        written.append(root / "docs" / name)
        written[-1].write_text(text, encoding="utf-8")
    for path in (root / "README.md", *sorted(set(root.glob("docs/*.md")) - set(written))):
        if not path.exists():
            continue
        text = path.read_text(encoding="utf-8")
        filled = fill_markers(text, results)
        if filled != text:
            path.write_text(filled, encoding="utf-8")
            written.append(path)
    return written


def performance_page(results: Path) -> str:
    """Return the page with everything that is stored in the folder `results` and has no document of its own."""
    stored = [result for result in _stored(results) if not hasattr(load_suite(result["suite"]), "DOCUMENT")]
    return "\n".join([_INTRODUCTION, *(_section(result) for result in stored)]).rstrip() + "\n"


def fill_markers(text: str, results: Path) -> str:
    """Return `text` with a short table in every marked place whose result is stored."""

    def fill(match: re.Match[str]) -> str:
        path = results / f"{match['name']}.json"
        if not path.exists():
            return match[0]
        result = _load(path)
        make = getattr(load_suite(result["suite"]), "short_table", None)
        table = goal_table(_rows(result)) if make is None else make(result)
        return f"{match[1]}{table}\n{match[3]}"

    return _MARKED.sub(fill, text)


def table_lines(rows: Sequence[Row]) -> list[tuple[str, str, str, str, str]]:
    """Return case, metric, value, interval and goal of every figure as text; an interval has no own line."""
    values = {(row.case, row.metric): row.value for row in rows}
    lines = []
    for row in rows:
        if (row.case, re.sub(r"_(low|high)$", "", row.metric)) in values.keys() - {(row.case, row.metric)}:
            continue
        low, high = (values.get((row.case, f"{row.metric}_{end}")) for end in ("low", "high"))
        texts = [format_value(row.metric, end) for end in (low, high) if end is not None]
        goal = "" if row.goal is None else f"<= {format_value(row.metric, row.goal)}"
        lines.append((row.case, row.metric, format_value(row.metric, row.value), " to ".join(texts), goal))
    return lines


def goal_table(rows: Sequence[Row]) -> str:
    """Return one line per figure with a goal or an interval."""
    header = ("case", "metric", "value", "95% interval", "goal")
    return markdown(header, [line for line in table_lines(rows) if line[3] or line[4]])


def format_value(metric: str, value: float) -> str:
    """Return `value` as text, in the unit that ends the metric's name."""
    if metric.endswith("_bytes_per_second"):
        return f"{format_bytes(round(value))}/s"
    if metric.endswith("_bytes"):
        return format_bytes(round(value))
    if metric.endswith("_seconds"):
        return format_seconds(value)
    if metric.startswith("num_") or metric == "batch_size":
        return f"{value:.0f}"
    return f"{value:.3f}"


def _stored(results: Path) -> list[dict[str, Any]]:
    return [_load(path) for path in sorted(results.glob("*.json"))]


def own_documents(results: Path) -> dict[str, str]:
    """Return the texts of the suites that have documents of their own, by file name."""
    pairs = [(load_suite(result["suite"]), result) for result in _stored(results)]
    return {suite.DOCUMENT: suite.page(result) for suite, result in pairs if hasattr(suite, "DOCUMENT")}


def _load(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def _rows(result: dict[str, Any]) -> list[Row]:
    return [Row(**row) for row in result["rows"]]


def _section(result: dict[str, Any]) -> str:
    rows, environment = _rows(result), result["environment"]
    lines = [
        f"## {load_suite(result['suite']).TITLE}: {result['device']}",
        "",
        f"{machine(environment)}; {_pairs(result)} per case.",
        f"Versions: {versions(environment)}. {_commits(result)}.",
        "",
        *(f"- {name}: {_sizes(sizes)}" for name, sizes in result["config"].items() if isinstance(sizes, dict)),
        "",
        goal_table(rows),
        "",
        _detail_table(rows),
        "",
        *failures(result, "Not measured:"),
    ]
    return "\n".join(lines)


def _pairs(result: dict[str, Any]) -> str:
    """Say how often each case was repeated."""
    counts = {case["repeats"] for case in result.get("cases", {}).values() if case["repeats"]}
    counts = counts or {result["repeats"]}
    low, high = min(counts), max(counts)
    return f"{low} pairs" if low == high else f"{low} to {high} pairs"


def _commits(result: dict[str, Any]) -> str:
    """Say what was measured; cases that were measured at different times may differ in that."""
    by_commit: dict[str, list[str]] = {}
    for key, case in result.get("cases", {}).items():
        by_commit.setdefault(case["commit"], []).append(key)
    if len(by_commit) < 2:
        return f"Commit: {next(iter(by_commit), result['environment']['commit'])}"
    return "Commits: " + "; ".join(f"{commit} ({', '.join(keys)})" for commit, keys in by_commit.items())


def versions(environment: dict[str, Any]) -> str:
    """Say what was measured with."""
    return ", ".join(f"{name} {version}" for name, version in environment["versions"].items())


def machine(environment: dict[str, Any]) -> str:
    """Say on what it was measured."""
    return f"{environment['processor']}, {environment['num_threads']} threads, {environment['system']}"


def failures(result: dict[str, Any], title: str) -> list[str]:
    """Say what could not be measured, and why; nothing where all could."""
    cases = [row["case"] for row in result["rows"] if row["metric"] == ERROR]
    if not cases:
        return []
    notes = result.get("notes", {})
    return [title, "", *(f"- {case}: {notes.get(case, 'for an unknown reason')}" for case in cases), ""]


def _sizes(sizes: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in sizes.items())


def _detail_table(rows: Sequence[Row]) -> str:
    """Return the other figures, one line per case."""
    others = [line for line in table_lines(rows) if not line[3] and not line[4] and line[1] != ERROR]
    cases = groupby(others, key=lambda line: line[0])
    lines = [(case, ", ".join(f"{line[1]} {line[2]}" for line in group)) for case, group in cases]
    return markdown(("case", "figures"), lines)


def markdown(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table."""
    rule = tuple("---" for _ in header)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, rule, *lines))
