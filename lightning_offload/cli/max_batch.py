"""``max-batch``: the largest batch that fits a budget, and the ones that train about as fast as any.

Throughput is ``b / max(T(b), n * l)``: samples over the planned step, which cannot take less than the host needs to
launch its ``n`` ops, ``l`` = 5 us each in eager PyTorch. Shortfall: the share of its peak that a
device is modelled to reach does not fall for small kernels, so small batches still look better than they are.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from lightning_offload.cli.batch_search import largest_from, largest_within, most_efficient, smallest_within
from lightning_offload.cli.output import Tell, console, progress, say, write_json
from lightning_offload.cli.plan import planned
from lightning_offload.cli.setting import Checked, PlanOptions, check_options, kept_storages
from lightning_offload.errors import BudgetInfeasibleError, UnsupportedError
from lightning_offload.graph.memory_plan import MemoryPlan
from lightning_offload.graph.step_graph import StepGraph
from lightning_offload.planning.problem import Problem
from lightning_offload.planning.request import PlanRequest
from lightning_offload.report.plan_view import overhead
from lightning_offload.report.scale import format_share
from lightning_offload.report.tables import add_row, make_table
from lightning_offload.units import format_bytes, format_seconds

LAUNCH_SECONDS = 5e-6
"""What the host needs to launch an op in eager PyTorch: no step is faster than its ops are launched."""

_ORDER = ("plain", "efficient", "best", "largest_efficient", "max")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BatchResult:
    """A batch size under its plan.

    Attributes:
        batch_size: Samples in the batch.
        samples_per_second: Throughput.
        predicted_step_seconds: Step time.
        overhead: By what share that is more than with everything kept.
        predicted_peak_bytes: Peak of device memory.
        plain_peak_bytes: The same with everything kept.
    """

    batch_size: int
    samples_per_second: float
    predicted_step_seconds: float
    overhead: float
    predicted_peak_bytes: int
    plain_peak_bytes: int


@dataclasses.dataclass(slots=True)
class SimulatedTrials:
    """Captured and planned batch sizes, each at most once.

    Attributes:
        checked: What is planned.
        tell: Says what is being done.
        graphs: Captured steps.
        settings: What bounds their memory.
        plans: Their plans.
    """

    checked: Checked
    tell: Tell
    graphs: dict[int, StepGraph] = dataclasses.field(default_factory=dict)
    settings: dict[int, PlanRequest] = dataclasses.field(default_factory=dict)
    plans: dict[int, MemoryPlan] = dataclasses.field(default_factory=dict)

    def graph(self, batch_size: int) -> StepGraph:
        """The step at a batch size."""
        if batch_size not in self.graphs:
            self.tell(f"capturing batch size {batch_size}")
            self.graphs[batch_size] = self.checked.workload.capture(batch_size, self.checked.device).graph
        return self.graphs[batch_size]

    def setting(self, batch_size: int) -> PlanRequest:
        """Its memory with everything kept, and at the least."""
        if batch_size not in self.settings:
            graph = self.graph(batch_size)
            problem = Problem(graph, kept_storages(graph, self.checked.options.keep))
            self.settings[batch_size] = PlanRequest(problem, self.checked.device, self.checked.budget_bytes)
        return self.settings[batch_size]

    def plain_bytes(self, batch_size: int) -> int:
        """Peak with everything kept."""
        return self.setting(batch_size).plain.peak_bytes

    def floor_bytes(self, batch_size: int) -> int:
        """The smallest peak that can be promised."""
        return self.setting(batch_size).floor.peak_bytes

    def plan(self, batch_size: int) -> MemoryPlan:
        """The plan under the budget."""
        if batch_size not in self.plans:
            graph = self.graph(batch_size)
            self.tell(f"planning batch size {batch_size}")
            self.plans[batch_size] = planned(self.checked, graph)
        return self.plans[batch_size]

    def needed_bytes(self, batch_size: int) -> int:
        """Need of the chosen policy: its peak where it meets the budget, the smallest budget it meets otherwise."""
        if self.checked.options.policy == "auto":
            return self.floor_bytes(batch_size)
        try:
            return self.plan(batch_size).predicted_peak_bytes
        except BudgetInfeasibleError as error:
            return error.floor_bytes

    def throughput(self, batch_size: int) -> float:
        """Samples per second."""
        launching = LAUNCH_SECONDS * len(self.graph(batch_size).ops)
        return batch_size / max(self.plan(batch_size).predicted_step_seconds, launching)

    def result(self, batch_size: int) -> BatchResult:
        """All of a batch size that counts."""
        plan = self.plan(batch_size)
        return BatchResult(
            batch_size=batch_size,
            samples_per_second=self.throughput(batch_size),
            predicted_step_seconds=plan.predicted_step_seconds,
            overhead=overhead(plan),
            predicted_peak_bytes=plan.predicted_peak_bytes,
            plain_peak_bytes=plan.plain_peak_bytes,
        )


def max_batch(options: PlanOptions, *, limit: int, tolerance: float, only_max: bool, as_json: bool) -> None:
    """Find and print the batch sizes that matter.

    Args:
        options: What to plan; its batch size is ignored.
        limit: The largest batch size to try.
        tolerance: Share of the best throughput that the efficient batch size may lose.
        only_max: Whether to leave the efficient batch size out, which takes longest to find.
        as_json: Whether to print JSON in place of a table.

    Raises:
        BudgetInfeasibleError: Not even one sample fits.
        OffloadError: An option is wrong.
    """
    if limit < 1:
        raise UnsupportedError(f"--limit {limit} is not positive: give the largest batch size to try")
    if not 0 <= tolerance < 1:
        raise UnsupportedError(
            f"--tolerance {tolerance} is not in [0, 1): give the throughput that may be lost, as 0.03"
        )
    checked = check_options(options)
    if checked.budget_bytes is None:
        raise UnsupportedError(f"{checked.device.name} has no limit of its own: give --budget")
    with progress(f"capturing steps of {options.target}") as tell:
        trials = SimulatedTrials(checked, tell)
        largest = largest_within(trials.needed_bytes, checked.budget_bytes, limit)
        if not largest:
            trials.plan(1)  # raises, and says why
        plain = largest_within(trials.plain_bytes, checked.budget_bytes, largest)
        found = {"plain": plain, "max": largest}
        if not only_max:
            found["best"] = most_efficient(trials.throughput, max(1, plain), largest)
            found["efficient"] = smallest_within(trials.throughput, found["best"], tolerance)
            found["largest_efficient"] = largest_from(trials.throughput, found["best"], largest, tolerance)
        results = {name: trials.result(batch) if batch else None for name, batch in found.items()}
    if as_json:
        _print_json(checked, results, limit, tolerance, len(trials.graphs))
    else:
        _print(checked, results, limit, tolerance)


def _print_json(
    checked: Checked, results: dict[str, BatchResult | None], limit: int, tolerance: float, num_captures: int
) -> None:
    header = {key: item for key, item in checked.header.items() if key != "batch_size"}
    payload: dict[str, Any] = header | {
        "policy": checked.options.policy,
        "budget_bytes": checked.budget_bytes,
        "limit": limit,
        "tolerance": tolerance,
        "num_captures": num_captures,
    }
    for name in _ORDER:
        result = results.get(name)
        payload[name] = dataclasses.asdict(result) if result is not None else None
    write_json(payload)


def _print(checked: Checked, results: dict[str, BatchResult | None], limit: int, tolerance: float) -> None:
    share = f"{100 * (1 - tolerance):g}%"
    labels = {
        "plain": "everything kept",
        "efficient": f"smallest at {share}",
        "best": "fastest",
        "largest_efficient": f"largest at {share}",
        "max": "largest that fits" if results["max"] and results["max"].batch_size < limit else "limit reached",
    }
    options = checked.options
    title = f"{options.target}, {options.dtype} on {checked.device.name}, budget {checked.budget_text}"
    say(title, style="bold")
    table = make_table("", "", ">batch", ">samples/s", ">step time", ">overhead", ">plain peak")
    for name in _ORDER:
        if name in results:
            add_row(table, labels[name], *_cells(results[name]))
    console().print(table)
    if "best" in results:
        say(f"{share}: of the fastest one's throughput, as modelled")


def _cells(result: BatchResult | None) -> tuple[str, ...]:
    if result is None:
        return ("none",) + ("-",) * 4
    return (
        f"{result.batch_size:,}",
        f"{result.samples_per_second:,.1f}",
        format_seconds(result.predicted_step_seconds),
        format_share(result.overhead),
        format_bytes(result.plain_peak_bytes),
    )
