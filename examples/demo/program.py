"""Trains a ResNet-50 on digits, plainly and within a budget, and says whether the results are the same.

Three runs one after the other: the plain one, a short one that learns the smallest feasible budget, and one within the
budget, which goes on with plain steps and its own in turns for their times. A separate process compares what the first
and the last have saved.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

from examples.demo.data import load_images
from examples.demo.pairs import ratio_of
from examples.demo.state import GROUPS
from examples.demo.summary import DemoSummary, result_table
from examples.demo.training import DemoConfig, RunResult, quiet_lightning, train
from examples.models.residual import resnet50
from lightning_offload.accelerators import accelerators_here, name_of
from lightning_offload.errors import OffloadError, UnsupportedError
from lightning_offload.plugins.report import Report
from lightning_offload.strategies import OffloadStrategy

NUM_PARAMETERS = 25_557_032
"""Parameters of the published ResNet-50 with 1000 classes; the demo refuses to run on anything else."""

_IMPORTED_FROM = Path(__file__).resolve().parents[2]


class DemoError(Exception):
    """The demo did not show what it is there to show."""


def main(config: DemoConfig | None = None, folder: Path | None = None) -> int:
    """Run the demo.

    Args:
        config: Sizes and lengths.
        folder: Where the saved states, summary.json and the page stay; None for nowhere.

    Returns:
        The exit status: 0 if training was identical and in budget.
    """
    console, errors = Console(), Console(stderr=True)
    try:
        run_demo(config or DemoConfig(), folder, console)
    except (DemoError, OffloadError) as error:
        errors.print(Text.assemble(("demo failed:", "bold red"), f" {error}"), soft_wrap=True)
        return 1
    return 0


def run_demo(config: DemoConfig, folder: Path | None, console: Console) -> DemoSummary:
    """Train three times, compare in a separate process, write summary.json and print the table.

    Args:
        config: Sizes and lengths.
        folder: Where the saved states, summary.json and the page stay, made where there is none; None for nowhere.
        console: For progress and the table.

    Raises:
        DemoError: If the result is not identical or not in budget, or the comparison could not be made.
        OffloadError: If the library refuses, scikit-learn is not installed or the folder cannot be written to.
    """
    check_architecture()
    load_images(config.image_size, limit=1)  # whether there are any is said before anything is shown
    if folder is not None:
        _prepare(folder)
    kept = nullcontext(str(folder)) if folder is not None else tempfile.TemporaryDirectory(prefix="lightning-offload-")
    with kept as place, quiet_lightning():
        summary, verdict, report = _run(config, Path(place), console)
        if folder is not None:
            summary.write(_summary_path(folder))
            _save_page(report, folder / "report.html", console)
    console.print(result_table(summary, {part: verdict[part] for part in GROUPS}, _title(config)))
    problems = summary.problems()
    if problems:
        first = verdict["first_difference"]
        raise DemoError("; ".join(problems) + (f" (first difference: {first})" if first else ""))
    return summary


def _prepare(folder: Path) -> None:
    """Make the folder, without the last run's summary: a failed run must not leave that one's success."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _summary_path(folder).unlink(missing_ok=True)
    except OSError as error:
        raise UnsupportedError(
            f"the folder {str(folder)!r} cannot be used: {error.strerror or error}; name another one"
        ) from None


def _summary_path(folder: Path) -> Path:
    return folder / "summary.json"


def _run(config: DemoConfig, folder: Path, console: Console) -> tuple[DemoSummary, dict[str, Any], Report]:
    """Train three times and compare: the figures, the verdict and the plugin's own account."""
    plain_path, ours_path = folder / "plain.pt", folder / "within_budget.pt"
    with _progress(console, config.total_steps) as (announce, advance):
        announce("plain training")
        plain = train(config, None, advance, state_path=plain_path)
        announce("measuring the smallest budget")
        floor_bytes = _floor_bytes(config, plain.peak_bytes, advance)
        budget_bytes = floor_bytes + round(config.savings_share * (plain.peak_bytes - floor_bytes))
        announce("training within the budget")
        strategy = OffloadStrategy(budget=budget_bytes)
        ours = train(config, strategy, advance, state_path=ours_path, num_pairs=config.num_pairs)
        announce("comparing in a separate process")
        verdict = compare_in_process(plain_path, ours_path)
    summary, report = summarise(config, plain, ours, floor_bytes, budget_bytes, identical=verdict["identical"])
    return summary, verdict, report


def _save_page(report: Report, path: Path, console: Console) -> None:
    """Write the page that shows the plan, where what draws it is installed."""
    try:
        report.save_html(path)
    except UnsupportedError as error:
        console.print(f"no page was written: {error}", markup=False, soft_wrap=True)
    else:
        console.print(
            f"{path} shows the plan and what was measured: open it in a browser", markup=False, soft_wrap=True
        )


def check_architecture() -> None:
    """Raise DemoError unless the network is the published ResNet-50, by its number of parameters."""
    with torch.device("meta"):
        num_parameters = sum(parameter.numel() for parameter in resnet50().parameters())
    if num_parameters != NUM_PARAMETERS:
        raise DemoError(f"the network has {num_parameters:,} parameters, a ResNet-50 has {NUM_PARAMETERS:,}")


def compare_in_process(plain_path: Path, ours_path: Path) -> dict[str, Any]:
    """Let a process that shares nothing with the runs compare their saved states.

    Returns:
        The verdict of `compare.py`.

    Raises:
        DemoError: If that process could not compare.
    """
    command = [
        sys.executable,
        "-m",
        "examples.demo.compare",
        str(plain_path.resolve()),
        str(ours_path.resolve()),
    ]
    done = subprocess.run(command, cwd=_IMPORTED_FROM, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode not in (0, 1) or not done.stdout.strip():
        raise DemoError(f"the comparison ended with status {done.returncode}: {done.stderr.strip()[-500:]}")
    verdict: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if verdict["identical"] is not (done.returncode == 0):
        raise DemoError(f"the comparison contradicts itself: status {done.returncode}, {verdict}")
    return verdict


def summarise(
    config: DemoConfig, plain: RunResult, ours: RunResult, floor_bytes: int, budget_bytes: int, *, identical: bool
) -> tuple[DemoSummary, Report]:
    """Put the figures of both runs together, beside the plugin's own account of the second.

    Raises:
        DemoError: If the run within the budget never came to a plan.
    """
    report = ours.report
    if report is None or report.predicted_peak_bytes is None:
        raise DemoError("the run within the budget ended without a plan; is LIGHTNING_OFFLOAD=0 set?")
    times = ours.times
    if times is None:
        raise DemoError("no steps were timed")
    ratio = ratio_of(times)
    summary = DemoSummary(
        identical=identical,
        budget_bytes=budget_bytes,
        tracked_steps=(config.num_warmup_steps + 1, config.num_warmup_steps + config.num_tracked_steps),
        plain_peak_bytes=plain.peak_bytes,
        measured_peak_bytes=ours.peak_bytes,
        predicted_peak_bytes=report.predicted_peak_bytes,
        floor_bytes=floor_bytes,
        num_pairs=len(times.ratios),
        plain_step_seconds=statistics.median(times.plain_seconds),
        step_seconds=statistics.median(times.other_seconds),
        step_ratio=ratio.median,
        step_ratio_low=ratio.low,
        step_ratio_high=ratio.high,
        kept_bytes=report.kept_bytes,
        swapped_bytes=report.swapped_bytes,
        recomputed_bytes=report.recomputed_bytes,
    )
    return summary, report


def _floor_bytes(config: DemoConfig, plain_peak_bytes: int, advance: Callable[[], None]) -> int:
    """Learn the smallest feasible budget from a short run whose budget is no constraint."""
    strategy = OffloadStrategy(budget=2 * plain_peak_bytes)
    report = train(config, strategy, advance, num_steps=config.num_probe_steps).report
    if report is None or report.floor_bytes is None:
        raise DemoError("the probing run did not find the smallest budget; is LIGHTNING_OFFLOAD=0 set?")
    return report.floor_bytes


def _title(config: DemoConfig) -> str:
    here = accelerators_here()
    device = name_of(here[0]) if here else "CPU"
    size = config.image_size
    return f"ResNet-50 on digits, {config.batch_size} images of {size}x{size}, {device}"


@contextmanager
def _progress(console: Console, total_steps: int) -> Iterator[tuple[Callable[[str], None], Callable[[], None]]]:
    """Show a progress bar; yields what names the current phase and what counts a step."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description:<32}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("steps"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("starting", total=total_steps)

        def announce(phase: str) -> None:
            progress.update(task, description=phase)

        def advance() -> None:
            progress.advance(task)

        yield announce, advance
