"""Train a ResNet-50 on digits, plainly and within a budget: `python -m examples.demo`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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

from examples.demo.state import GROUPS
from examples.demo.summary import DemoSummary, result_table
from examples.demo.training import DemoConfig, RunResult, quiet_lightning, train
from examples.models import resnet50
from lightning_offload import OffloadError, OffloadStrategy, UnsupportedError
from lightning_offload.plugins.report import Report

NUM_PARAMETERS = 25_557_032
"""Parameters of the published ResNet-50 with 1000 classes; the demo refuses to run on anything else."""

OUTPUT_FOLDER = Path("build/demo")
_CHECKOUT = Path(__file__).resolve().parents[2]


class DemoError(Exception):
    """The demo did not show what it is there to show."""


def main(config: DemoConfig | None = None, folder: Path = OUTPUT_FOLDER) -> int:
    """Run the demo.

    Args:
        config: Sizes and lengths.
        folder: Where the saved states and summary.json go.

    Returns:
        The exit status: 0 if training was identical and in budget.
    """
    console, errors = Console(), Console(stderr=True)
    try:
        with quiet_lightning():
            run_demo(config or DemoConfig(), folder, console)
    except (DemoError, OffloadError) as error:
        errors.print(f"[bold red]demo failed:[/] {error}", highlight=False, soft_wrap=True)
        return 1
    return 0


def run_demo(config: DemoConfig, folder: Path, console: Console) -> DemoSummary:
    """Train three times, compare in a separate process, write summary.json and print the table.

    Raises:
        DemoError: If the result is not identical or not in budget, or the comparison could not be made.
        OffloadError: If the library refuses.
    """
    check_architecture()
    summary_path = folder / "summary.json"
    summary_path.unlink(missing_ok=True)  # a failed run must not leave the last one's success
    plain_path, ours_path = folder / "plain.pt", folder / "within_budget.pt"
    with _progress(console, config.total_steps) as (announce, advance):
        announce("plain training")
        plain = train(config, None, advance, state_path=plain_path)
        announce("measuring the smallest budget")
        floor_bytes = _floor_bytes(config, plain.peak_bytes, advance)
        budget_bytes = floor_bytes + round(config.savings_share * (plain.peak_bytes - floor_bytes))
        announce("training within the budget")
        ours = train(config, OffloadStrategy(budget=budget_bytes), advance, state_path=ours_path)
        announce("comparing in a separate process")
        verdict = compare_in_process(plain_path, ours_path)
    summary = summarise(config, plain, ours, floor_bytes, budget_bytes, identical=verdict["identical"])
    summary.write(summary_path)
    if ours.report is not None:
        _save_page(ours.report, folder / "report.html", console)
    console.print(result_table(summary, {part: verdict[part] for part in GROUPS}, _title(config)))
    problems = summary.problems()
    if problems:
        first = verdict["first_difference"]
        raise DemoError("; ".join(problems) + (f" (first difference: {first})" if first else ""))
    return summary


def _save_page(report: Report, path: Path, console: Console) -> None:
    """Write the page that shows the plan, where what draws it is installed."""
    try:
        report.save_html(path)
    except UnsupportedError as error:
        console.print(f"no page was written: {error}", soft_wrap=True)
    else:
        console.print(f"{path} shows the plan and what was measured; open it in a browser", soft_wrap=True)


def check_architecture() -> None:
    """Raise DemoError unless the network is the published ResNet-50, by its number of parameters."""
    with torch.device("meta"):
        num_parameters = sum(parameter.numel() for parameter in resnet50().parameters())
    if num_parameters != NUM_PARAMETERS:
        raise DemoError(f"the network has {num_parameters:,} parameters, a ResNet-50 has {NUM_PARAMETERS:,}")


def compare_in_process(plain_path: Path, ours_path: Path) -> dict[str, Any]:
    """Let a process that shares nothing with the runs compare their saved states.

    Returns:
        The verdict of `examples.demo.compare`.

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
    done = subprocess.run(command, cwd=_CHECKOUT, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode not in (0, 1) or not done.stdout.strip():
        raise DemoError(f"the comparison ended with status {done.returncode}: {done.stderr.strip()[-500:]}")
    verdict: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if verdict["identical"] is not (done.returncode == 0):
        raise DemoError(f"the comparison contradicts itself: status {done.returncode}, {verdict}")
    return verdict


def summarise(
    config: DemoConfig, plain: RunResult, ours: RunResult, floor_bytes: int, budget_bytes: int, *, identical: bool
) -> DemoSummary:
    """Put the figures of both runs together.

    Raises:
        DemoError: If the run within the budget never came to a plan.
    """
    report = ours.report
    if report is None or report.predicted_peak_bytes is None:
        raise DemoError("the run within the budget ended without a plan; is LIGHTNING_OFFLOAD=0 set?")
    return DemoSummary(
        identical=identical,
        budget_bytes=budget_bytes,
        tracked_steps=(config.num_warmup_steps + 1, config.num_warmup_steps + config.num_tracked_steps),
        plain_peak_bytes=plain.peak_bytes,
        measured_peak_bytes=ours.peak_bytes,
        predicted_peak_bytes=report.predicted_peak_bytes,
        floor_bytes=floor_bytes,
        plain_step_seconds=plain.step_seconds,
        step_seconds=ours.step_seconds,
        kept_bytes=report.kept_bytes,
        swapped_bytes=report.swapped_bytes,
        recomputed_bytes=report.recomputed_bytes,
    )


def _floor_bytes(config: DemoConfig, plain_peak_bytes: int, advance: Callable[[], None]) -> int:
    """Learn the smallest feasible budget from a short run whose budget is no constraint."""
    strategy = OffloadStrategy(budget=2 * plain_peak_bytes)
    report = train(config, strategy, advance, num_steps=config.num_probe_steps).report
    if report is None or report.floor_bytes is None:
        raise DemoError("the probing run did not find the smallest budget; is LIGHTNING_OFFLOAD=0 set?")
    return report.floor_bytes


def _title(config: DemoConfig) -> str:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
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


if __name__ == "__main__":
    sys.exit(main())
