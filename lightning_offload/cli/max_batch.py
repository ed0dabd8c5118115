"""``max-batch``: the largest batch that fits a budget, and the ones that train about as fast as any.

A step is captured at two sizes, and predicted from these at others: its bytes exactly, so that the largest size is
found without capturing those on the way (:mod:`~lightning_offload.planning.step_model`). What is printed is captured
and planned at its own size; where that is not as predicted, the search is made again with what was learned.

Throughput is ``b / (T(b) + n * l)``: samples over the planned step and what its ``n`` ops take however small they are,
``l`` = 5 us each: to be launched, and to fill the device and drain it. Shortfall: within a kernel the share of its peak
that a device is modelled to reach does not fall with the batch, so small ones still look better than they are.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

from lightning_offload.cli.batch_search import farthest_within, largest_within, most_efficient
from lightning_offload.cli.options import PlanOptions
from lightning_offload.cli.output import Tell, console, progress, say, write_json
from lightning_offload.cli.plan import planned
from lightning_offload.cli.setting import Checked, check_options, kept_storages
from lightning_offload.errors import BudgetInfeasibleError, TuningError, UnsupportedError
from lightning_offload.graph.memory_plan import MemoryPlan
from lightning_offload.graph.step_graph import StepGraph
from lightning_offload.planning.family import FamilyPlanner
from lightning_offload.planning.problem import Problem
from lightning_offload.planning.request import PlanRequest
from lightning_offload.planning.step_model import StepModel
from lightning_offload.report.plan_view import overhead
from lightning_offload.report.scale import format_share
from lightning_offload.report.tables import add_row, make_table
from lightning_offload.units import format_bytes, format_seconds

LAUNCH_SECONDS = 5e-6
"""What the host needs to launch an op in eager PyTorch, and about what the least kernel takes a device."""

_FIRST_SIZES = (8, 32)
"""Small enough that libraries choose the kernels of large ones, and no copies are left out as with one sample."""

_MAX_ATTEMPTS = 4  # searches among predictions, before each size that is tried is captured

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
    """Batch sizes, captured or predicted from a few that were, each planned at most once.

    Attributes:
        checked: What is planned.
        tell: Says what is being done.
        captured: Captured steps.
        planner: Plans steps that were not captured; None where nothing predicts them, and each is captured.
        settings: What bounds the memory of a step.
        plans: Plans of steps.
        is_by_capture: Whether nothing is predicted any more: predictions turned out wrong.
    """

    checked: Checked
    tell: Tell
    captured: dict[int, StepGraph] = dataclasses.field(default_factory=dict)
    planner: FamilyPlanner | None = None
    settings: dict[int, PlanRequest] = dataclasses.field(default_factory=dict)
    plans: dict[int, MemoryPlan] = dataclasses.field(default_factory=dict)
    is_by_capture: bool = False

    def capture(self, batch_size: int) -> StepGraph:
        """Capture the step at a batch size; what was predicted of it is forgotten."""
        if batch_size not in self.captured:
            self.tell(f"capturing batch size {batch_size:,}, {len(self.captured)} captured so far")
            self.captured[batch_size] = self.checked.workload.capture(batch_size, self.checked.device).graph
            self.settings.pop(batch_size, None)
            self.plans.pop(batch_size, None)
        return self.captured[batch_size]

    def learn(self) -> None:
        """Predict other sizes by those that were captured, where these are alike."""
        self.planner = None
        if not self.is_by_capture and len(self.captured) > 1:
            with contextlib.suppress(TuningError):
                model = StepModel.fit(self.captured)
                self.planner = FamilyPlanner(model, kept_storages(model.structure, self.checked.options.keep))
        for known in (self.settings, self.plans):
            for batch_size in set(known) - set(self.captured):
                del known[batch_size]

    def graph(self, batch_size: int) -> StepGraph:
        """The step at a batch size, captured or predicted."""
        if self.planner is None or batch_size in self.captured:
            return self.capture(batch_size)
        return self.planner.model.at(batch_size)

    @property
    def _is_quick(self) -> bool:
        return self.checked.options.policy == "auto" and self.checked.device.host_memory_bytes is None

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
        """The plan under the budget: of a predicted step a quick one, which is rather too slow."""
        if batch_size not in self.plans:
            self.tell(f"planning batch size {batch_size:,}, {len(self.captured)} captured so far")
            self.plans[batch_size] = self._plan(batch_size)
        return self.plans[batch_size]

    def _plan(self, batch_size: int) -> MemoryPlan:
        device, planner = self.checked.device, self.planner
        if planner is None or batch_size in self.captured or not self._is_quick:
            return planned(self.checked, self.graph(batch_size))
        figures = planner.model.figures_at(batch_size)
        return planner.plan(planner.model.sized(figures), figures, device, self.checked.budget_bytes)

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
        ops = self.planner.model.structure.ops if self.planner is not None else self.graph(batch_size).ops
        return batch_size / (self.plan(batch_size).predicted_step_seconds + LAUNCH_SECONDS * len(ops))

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


def find_batches(trials: SimulatedTrials, limit: int, tolerance: float, *, only_max: bool) -> dict[str, int]:
    """The batch sizes that matter, each captured, and planned as captured.

    They are looked for among predicted steps. Where capturing one shows something else, that is learned from and the
    search is made again; where that does not end, each size that is tried is captured.

    Args:
        trials: Captures, predicts and plans.
        limit: The largest batch size.
        tolerance: Share of the best throughput that may be lost.
        only_max: Whether to leave throughput out.

    Returns:
        By name: the size; 0 for none.

    Raises:
        BudgetInfeasibleError: Not even one sample fits.
    """
    for batch_size in {min(size, limit) for size in _FIRST_SIZES}:
        trials.capture(batch_size)
    for attempt in range(_MAX_ATTEMPTS + 1):
        trials.is_by_capture = attempt == _MAX_ATTEMPTS
        trials.learn()
        found = _search(trials, limit, tolerance, only_max=only_max)
        predicted = {size: _memory_of(trials, size) for size in (found["plain"], found["max"]) if size}
        for size in filter(None, found.values()):
            trials.capture(size)
        if trials.is_by_capture or (
            all(_memory_of(trials, size) == known for size, known in predicted.items())
            and (only_max or _is_as_fast(trials, found, tolerance))
        ):
            break
    return found


def _search(trials: SimulatedTrials, limit: int, tolerance: float, *, only_max: bool) -> dict[str, int]:
    budget_bytes = trials.checked.budget_bytes
    assert budget_bytes is not None
    largest = largest_within(trials.needed_bytes, budget_bytes, limit)
    if not largest:
        trials.capture(1)
        trials.plan(1)  # raises, and says why, unless one sample is less than it was predicted to be
        largest = 1
    plain = largest_within(trials.plain_bytes, budget_bytes, largest)
    found = {"plain": plain, "max": largest}
    if not only_max:
        found["best"] = most_efficient(trials.throughput, max(1, plain), largest)
        found["efficient"] = farthest_within(trials.throughput, found["best"], 0, tolerance)
        found["largest_efficient"] = farthest_within(trials.throughput, found["best"], largest, tolerance)
    return found


def _memory_of(trials: SimulatedTrials, batch_size: int) -> tuple[int, int]:
    return trials.plain_bytes(batch_size), trials.needed_bytes(batch_size)


def _is_as_fast(trials: SimulatedTrials, found: dict[str, int], tolerance: float) -> bool:
    """Whether the captured steps are as fast as they were predicted to be, one against the other."""
    enough = (1 - tolerance) * trials.throughput(found["best"])
    return all(trials.throughput(found[name]) >= enough for name in ("efficient", "largest_efficient"))


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
        found = find_batches(trials, limit, tolerance, only_max=only_max)
        results = {name: trials.result(batch) if batch else None for name, batch in found.items()}
    if as_json:
        _print_json(checked, results, limit, tolerance, len(trials.captured))
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
        "efficient": f"smallest at {share}*",
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
    if results.get("efficient") is not None:
        say(
            f"{share}: of the fastest one's throughput, as modelled. * a lower estimate: kernels are taken "
            "to reach on small batches what they reach on large ones. Measure it where it matters."
        )


def _cells(result: BatchResult | None) -> tuple[str, ...]:
    if result is None:
        return ("none",) + ("-",) * 4
    return (
        f"{result.batch_size:,}",
        f"{result.samples_per_second:,.1f}",
        format_seconds(result.batch_size / result.samples_per_second),
        format_share(result.overhead),
        format_bytes(result.plain_peak_bytes),
    )
