"""Command line of the benchmarks: `python -m benchmarks SUITE [--json] [--quick] [--pairs N]`.

`python -m benchmarks gpu` knows more: `--minutes`, `--cases`, `--fresh`, `--list`; `planner` and `tuner` know
`--minutes` and `--fresh`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks import environment, tables
from benchmarks.gpu.cases import all_cases
from benchmarks.registry import SUITES, load_suite
from benchmarks.results import (
    ERROR,
    RESULTS_FOLDER,
    Measurements,
    Options,
    Row,
    json_line,
    result_path,
    write_result,
)

_QUICK_PAIRS = 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for; returns the exit status."""
    parsed = _parser().parse_args(arguments)
    if parsed.suite == "tables":
        for path in tables.write_documents():
            print(f"wrote {path}")
        return 0
    if parsed.list:
        for case in all_cases("cpu", quick=parsed.quick):
            print(f"{case.key:<32} about {case.seconds:.0f} s{' a trial' if case.search else ''}")
        return 0
    if parsed.pairs < 2:
        print(f"error: --pairs {parsed.pairs} is too few for an interval; give at least 2", file=sys.stderr)
        return 2
    if environment.is_emulated() and _would_commit(parsed):
        print("error: the emulated device has no figures to keep; add --quick, or --results FOLDER", file=sys.stderr)
        return 2
    device = environment.device_name(parsed.device)
    described = environment.describe("cpu" if device == "cpu" else "cuda")  # before the suite writes its pictures
    try:
        measurements = run_suite(parsed.suite, _options(parsed))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return _finish(parsed, measurements, device, described)


def _would_commit(parsed: argparse.Namespace) -> bool:
    """Whether results go to the folder of those that are committed, or into it."""
    folder = parsed.results or (None if parsed.quick else RESULTS_FOLDER)
    return folder is not None and folder.resolve().is_relative_to(RESULTS_FOLDER)


def _options(parsed: argparse.Namespace) -> Options:
    return Options(
        quick=parsed.quick,
        num_pairs=_QUICK_PAIRS if parsed.quick else parsed.pairs,
        device=parsed.device,
        minutes=parsed.minutes,
        cases=tuple(name for text in parsed.cases for name in text.split(",") if name),
        fresh=parsed.fresh,
        folder=parsed.results,
    )


def _finish(parsed: argparse.Namespace, measurements: Measurements, device: str, described: dict[str, Any]) -> int:
    """Store and show what was measured; the exit status says whether all of it could be."""
    has_told = getattr(load_suite(parsed.suite), "STORES_ITSELF", False)
    if has_told and not parsed.quick and parsed.results is None:
        tables.write_documents()
    elif not has_told and not parsed.quick:
        store(parsed.suite, device, measurements, described, parsed.results or RESULTS_FOLDER)
    if parsed.json:
        print(json_line(parsed.suite, device, measurements.rows))
    elif not has_told:
        own_table = getattr(load_suite(parsed.suite), "table", None)
        Console().print(own_table(measurements) if own_table else _table(parsed.suite, device, measurements.rows))
    for case, note in measurements.notes.items():
        print(f"{case}: {note}", file=sys.stderr)
    return 1 if any(row.metric == ERROR for row in measurements.rows) else 0


def run_suite(name: str, options: Options) -> Measurements:
    """Run a suite under a progress bar on standard error."""
    columns = (TextColumn("{task.description:<40}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        return load_suite(name).run(options, progress)


def store(suite: str, device: str, measurements: Measurements, described: dict[str, Any], folder: Path) -> None:
    """Write the result file, with the environment as described, and bring the documents up to date with it."""
    path = result_path(suite, device, folder)
    write_result(path, suite, device, measurements, described)
    if folder == RESULTS_FOLDER:
        tables.write_documents()
    print(f"wrote {path}", file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Run a benchmark suite.")
    parser.add_argument(
        "suite",
        choices=[*sorted(SUITES), "tables"],
        help="what to measure; 'tables' writes the documentation's tables from the stored results",
    )
    parser.add_argument("--json", action="store_true", help="end the output with one JSON object on one line")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="tiny models, few repeats, nothing stored: tries the harness only",
    )
    parser.add_argument(
        "--pairs",
        type=int,
        default=Options().num_pairs,
        help="pairs of steps per comparison (default %(default)s)",
    )
    parser.add_argument("--device", help="torch device to measure on (default: the GPU if there is one)")
    parser.add_argument("--results", type=Path, metavar="FOLDER", help="where results are read and stored")
    gpu = parser.add_argument_group("suites gpu, planner and tuner, which go on where they stopped")
    gpu.add_argument(
        "--minutes",
        type=float,
        help="limit on the whole (default 9 for gpu, none for the others); call again to go on",
    )
    gpu.add_argument("--cases", nargs="+", default=[], metavar="NAME", help="gpu: only these, by name or pattern")
    gpu.add_argument("--fresh", action="store_true", help="measure again what was measured before")
    gpu.add_argument("--list", action="store_true", help="gpu: list the cases and end")
    return parser


def _table(suite: str, device: str, rows: Sequence[Row]) -> Table:
    """Return all figures, each case named once, an interval beside its figure."""
    table = Table(title=f"{suite} on {device}")
    for name in ("case", "metric", "value", "95% interval", "goal"):
        table.add_column(name, justify="left" if name in ("case", "metric") else "right")
    last_case = ""
    for case, *cells in tables.table_lines(rows):
        if last_case and case != last_case:
            table.add_section()
        table.add_row("" if case == last_case else case, *cells)
        last_case = case
    return table


if __name__ == "__main__":
    sys.exit(main())
