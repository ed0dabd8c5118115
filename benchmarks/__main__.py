"""Command line of the benchmarks: `python -m benchmarks SUITE [--json] [--quick] [--pairs N]`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks import environment, tables
from benchmarks.registry import SUITES, load_suite
from benchmarks.results import (
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
    if parsed.pairs < 2:
        print(f"error: --pairs {parsed.pairs} is too few for an interval; give at least 2", file=sys.stderr)
        return 2
    options = Options(quick=parsed.quick, num_pairs=_QUICK_PAIRS if parsed.quick else parsed.pairs)
    measurements = run_suite(parsed.suite, options)
    device = environment.device_name()
    if not options.quick:
        store(parsed.suite, device, measurements)
    if parsed.json:
        print(json_line(parsed.suite, device, measurements.rows))
    else:
        Console().print(_table(parsed.suite, device, measurements.rows))
    return 0


def run_suite(name: str, options: Options) -> Measurements:
    """Run a suite under a progress bar on standard error."""
    columns = (TextColumn("{task.description:<40}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        return load_suite(name).run(options, progress)


def store(suite: str, device: str, measurements: Measurements, folder: Path = RESULTS_FOLDER) -> None:
    """Write the result file and bring the documents up to date with it."""
    path = result_path(suite, device, folder)
    write_result(path, suite, device, measurements, environment.describe())
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
