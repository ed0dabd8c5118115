"""The demo's result: one rich table for people, one JSON file for programs, and what must hold in it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.table import Table
from rich.text import Text

from lightning_offload.units import format_bytes, format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSummary:
    """Figures of the plain run and of the run within the budget.

    Attributes:
        identical: Whether losses, weights, statistics, optimizer and random state are the same, bit for bit.
        budget_bytes: The budget that was set.
        tracked_steps: First and last of the steps, counted from 1, whose live bytes the demo counted, in both runs.
        plain_peak_bytes: Measured peak of the plain run.
        measured_peak_bytes: Measured peak within the budget, by the demo's own tracker.
        predicted_peak_bytes: Peak that the plan promised.
        floor_bytes: Smallest feasible budget.
        num_pairs: Pairs of steps that were timed, one plain and one within the budget, in turns.
        plain_step_seconds: Their median step time, plain.
        step_seconds: Their median step time within the budget.
        step_ratio: Median of the pairs' ratios, within the budget over plain.
        step_ratio_low: Lower end of its 95% interval.
        step_ratio_high: Upper end of it.
        kept_bytes: Saved bytes that stay on the device.
        swapped_bytes: Saved bytes that go to the host and back.
        recomputed_bytes: Saved bytes that are dropped and computed again.
    """

    identical: bool
    budget_bytes: int
    tracked_steps: tuple[int, int]
    plain_peak_bytes: int
    measured_peak_bytes: int
    predicted_peak_bytes: int
    floor_bytes: int
    num_pairs: int
    plain_step_seconds: float
    step_seconds: float
    step_ratio: float
    step_ratio_low: float
    step_ratio_high: float
    kept_bytes: int
    swapped_bytes: int
    recomputed_bytes: int

    def write(self, path: Path) -> None:
        """Write the figures as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    def problems(self) -> list[str]:
        """Return what a user must not see, as sentences; empty if all is well."""
        found = []
        if not self.identical:
            found.append("training within the budget did not give the plain run's bits")
        if self.measured_peak_bytes > self.budget_bytes:
            over = format_bytes(self.measured_peak_bytes - self.budget_bytes)
            found.append(f"the measured peak is {over} above the budget of {format_bytes(self.budget_bytes)}")
        if self.measured_peak_bytes <= 0 or self.plain_peak_bytes <= 0:
            found.append("no live bytes were counted")
        return found


def result_table(summary: DemoSummary, verdict: dict[str, bool], title: str) -> Table:
    """Return the table of all figures.

    Args:
        summary: The figures.
        verdict: The comparison's answer for each part of the saved state.
        title: What was trained, on what.
    """
    table = Table(title=title, header_style="bold")
    for column in ("", "plain", "within budget"):
        table.add_column(column, justify="left" if not column else "right", no_wrap=True)
    share = summary.measured_peak_bytes / summary.plain_peak_bytes
    table.add_row("budget", "-", format_bytes(summary.budget_bytes))
    table.add_row("smallest feasible budget", "-", format_bytes(summary.floor_bytes))
    table.add_row("peak predicted", "-", format_bytes(summary.predicted_peak_bytes))
    table.add_row(
        "peak measured, steps {} to {}".format(*summary.tracked_steps),
        format_bytes(summary.plain_peak_bytes),
        f"{format_bytes(summary.measured_peak_bytes)} ({share:.0%})",
    )
    table.add_row(
        f"step time, {summary.num_pairs} pairs in turns",
        format_seconds(summary.plain_step_seconds),
        f"{format_seconds(summary.step_seconds)} ({summary.step_ratio:.2f}x)",
    )
    spread = f"{summary.step_ratio_low:.2f}x to {summary.step_ratio_high:.2f}x"
    table.add_row("95% interval of their median ratio", "-", spread)
    table.add_section()
    for name in ("kept", "swapped", "recomputed"):
        table.add_row(f"saved tensors {name}", "-", format_bytes(getattr(summary, f"{name}_bytes")))
    table.add_section()
    for part, same in verdict.items():
        verdict_text = Text("identical", style="green") if same else Text("different", style="bold red")
        table.add_row(_PART_LABELS.get(part, part), "", verdict_text)
    return table


_PART_LABELS = {
    "statistics": "BatchNorm statistics",
    "optimizer": "optimizer state",
    "random": "random state",
}
