"""What the same memory costs by PyTorch's own means: checkpointing per block, and selective checkpointing.

One model of each kind trains on one batch in one process. First the true peak of each peer is counted, by a tracker of
live storages that asks nobody. Then a budget is sought under which our own steps peak at no more than that, by the
same tracker. In the end all take turns, the plain step among them, each with one untimed step and one timed: a step
finds the allocator and caches as steps of its own kind leave them, as in training (`malloc` gives pages back after a
large step, and whoever came next paid for that). `overhead` is the median of a contender's step times over those of the
plain step of the same round, less one; `overhead_over_peer` is ours over the peer's.

`prediction_error` is how far the step time that the report predicts, as it stood before the timing began, is from the
measured median: 0.1 for a tenth, on whichever side. By then a dozen steps have run under the plan, three in a turn, of
which the report knows: those whose bytes were counted, which is slow, are no longer among the last nine, that it goes
by. `plan_error` is the same of the plan's own figure, from before the first of them.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from rich.progress import Progress

from benchmarks import environment, workloads
from benchmarks.checkpoints import BlockCheckpoints, blocks_of
from benchmarks.gpu.memory import measure_peak
from benchmarks.pairs import PairedTimes, quartiles, ratio_of, time_rounds
from benchmarks.results import Measurements, Options, Row
from benchmarks.tables import markdown
from benchmarks.workloads import Workload, plan_steps
from lightning_offload import MemoryPlugin
from lightning_offload.errors import BudgetInfeasibleError
from lightning_offload.plugins.report import Report
from lightning_offload.units import format_bytes

TITLE = "PyTorch's own checkpointing at the same peak"

_GOAL = 0.5  # of the peer's overhead
_PREDICTED_GOAL = 0.1
_CLOSE_SHARE = 0.01  # of the peer's peak: nearer than this a budget is not sought
_MAX_BUDGETS = 4
_NUM_WARMUP_TURNS, _NUM_WARMUP_STEPS = 4, 3

Make = Callable[[torch.device, bool], Workload]
_Context = Callable[[], AbstractContextManager[object]]


def _resnet(device: torch.device, quick: bool) -> Workload:
    return workloads.demo_resnet(device, quick=quick)


def _transformer(name: str, device: torch.device, quick: bool) -> Workload:
    return workloads.transformer(name, device, quick=quick)


MODELS: dict[str, Make] = {
    "ResNet-50": _resnet,
    "GPT-2": functools.partial(_transformer, "gpt2"),
    "BERT": functools.partial(_transformer, "bert"),
    "Llama-like": functools.partial(_transformer, "llama"),
}
PEERS = {"checkpoint per block": "on", "selective checkpointing": "selective"}
"""By what rows call them, the method of :class:`BlockCheckpoints`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ours:
    """Our steps at a peer's peak.

    Attributes:
        memory: The plugin, whose plan is final.
        budget_bytes: Its budget.
        peak_bytes: True peak of a step.
    """

    memory: MemoryPlugin
    budget_bytes: int
    peak_bytes: int


def run(options: Options, progress: Progress) -> Measurements:
    """Measure all models; see the module's description."""
    device = environment.device()
    task = progress.add_task("peers", total=len(MODELS))
    rows: list[Row] = []
    spread: dict[str, dict[str, list[float]]] = {}
    config: dict[str, Any] = {}
    for title, make in MODELS.items():
        progress.update(task, description=title)
        gc.collect()
        trained = make(device, options.quick)
        config[title] = trained.config
        found, quartiles_by_case = _model(title, trained, options)
        rows += found
        spread |= quartiles_by_case
        progress.advance(task)
    return Measurements(rows=rows, config=config, repeats=options.num_pairs, spread=spread)


def _model(
    title: str, trained: Workload, options: Options
) -> tuple[list[Row], dict[str, dict[str, list[float]]]]:  # fmt: skip
    """Rows of a model, and the quartiles of its step times."""
    checkpoints = BlockCheckpoints(blocks_of(trained.model))
    contexts: dict[str, _Context] = {name: getattr(checkpoints, how) for name, how in PEERS.items()}
    steps: dict[str, Callable[[], None]] = {"plain": trained.step}
    with contextlib.ExitStack() as stack:
        plain_peak = measure_peak(trained, trained.step).allocated_bytes
        peaks = {
            name: measure_peak(trained, functools.partial(trained.step, context)).allocated_bytes
            for name, context in contexts.items()
        }
        baseline_bytes = trained.limits().plain_peak_bytes - plain_peak
        ours: dict[str, _Ours] = {}
        for name, context in contexts.items():
            ours[name] = _at_peak(trained, peaks[name], baseline_bytes, stack)
            steps[name] = functools.partial(trained.step, context)
            steps[_name_of_ours(name)] = functools.partial(trained.managed_step, ours[name].memory)
        _warm(steps)
        reports = {name: found.memory.report() for name, found in ours.items()}
        times = _time(steps, options.num_pairs)
    rows = [Row(case=f"{title}, plain", metric="peak_bytes", value=float(plain_peak))]
    for name, found in ours.items():
        rows += _rows(title, name, times, peaks[name], found, reports[name])
    spread = {f"{title}, {name}": {"step_seconds": quartiles(seconds)} for name, seconds in times.items()}
    return rows, spread


def _name_of_ours(peer: str) -> str:
    return f"ours at the peak of {peer}"


def _rows(
    title: str, peer: str, times: dict[str, list[float]], peak_bytes: int, ours: _Ours, report: Report
) -> Iterator[Row]:
    overheads = {}
    for name, num_bytes in ((peer, peak_bytes), (_name_of_ours(peer), ours.peak_bytes)):
        case = f"{title}, {name}"
        ratio = ratio_of(PairedTimes(plain_seconds=tuple(times["plain"]), other_seconds=tuple(times[name])))
        overheads[name] = ratio.median - 1
        yield Row(case=case, metric="overhead", value=ratio.median - 1)
        yield Row(case=case, metric="overhead_low", value=ratio.low - 1)
        yield Row(case=case, metric="overhead_high", value=ratio.high - 1)
        yield Row(case=case, metric="peak_bytes", value=float(num_bytes))
    case = f"{title}, {_name_of_ours(peer)}"
    measured = quartiles(times[_name_of_ours(peer)])[1]
    yield Row(
        case=case, metric="overhead_over_peer", value=overheads[_name_of_ours(peer)] / overheads[peer], goal=_GOAL
    )
    yield Row(case=case, metric="budget_bytes", value=float(ours.budget_bytes))
    yield Row(case=case, metric="step_seconds", value=measured)
    predicted, planned = report.predicted_step_seconds, report.planned
    if predicted is not None and planned is not None:
        by_plan = planned.plan.predicted_step_seconds
        yield Row(case=case, metric="predicted_step_seconds", value=predicted)
        yield Row(case=case, metric="prediction_error", value=abs(predicted / measured - 1), goal=_PREDICTED_GOAL)
        yield Row(case=case, metric="plan_error", value=abs(by_plan / measured - 1))


def short_table(result: dict[str, Any]) -> str:
    """Return both overheads at each peer's peak, side by side, for the pages that compare tools."""
    values = {(row["case"], row["metric"]): row["value"] for row in result["rows"]}
    lines = []
    for model in MODELS:
        for peer in PEERS:
            theirs, ours = f"{model}, {peer}", f"{model}, {_name_of_ours(peer)}"
            if (ours, "overhead_over_peer") not in values:
                continue
            peak, plain = values[theirs, "peak_bytes"], values[f"{model}, plain", "peak_bytes"]
            lines.append((
                model, peer, f"{format_bytes(round(peak))}, {peak / plain:.0%} of plain's",
                *(f"{values[case, 'overhead']:+.1%}" for case in (theirs, ours)),
                f"{values[ours, 'overhead_over_peer']:.2f}", f"{values.get((ours, 'prediction_error'), math.nan):.1%}",
            ))  # fmt: skip
    header = ("model", "peer", "true peak of both", "peer adds", "ours adds", "ours / peer's", "prediction is off by")
    return markdown(header, lines)


def _at_peak(trained: Workload, peak_bytes: int, baseline_bytes: int, stack: contextlib.ExitStack) -> _Ours:
    """Find the budget under which our steps peak at no more than that, and leave its plugin to the stack.

    Args:
        trained: The model.
        peak_bytes: The peer's true peak.
        baseline_bytes: What counts in a budget and not in a true peak: whatever else is alive in the process.
        stack: What ends the plugin.
    """
    budget_bytes, best = peak_bytes + baseline_bytes, None
    held = contextlib.ExitStack()
    for _ in range(_MAX_BUDGETS):
        with contextlib.ExitStack() as trial:
            memory = trial.enter_context(MemoryPlugin(f"{budget_bytes}B", module=trained.model))
            try:
                step = functools.partial(trained.managed_step, memory)
                plan_steps(memory, step)
            except BudgetInfeasibleError as error:
                budget_bytes = error.floor_bytes
                continue
            found_bytes = measure_peak(trained, step).allocated_bytes
            found = _Ours(memory=memory, budget_bytes=budget_bytes, peak_bytes=found_bytes)
            spare_bytes = peak_bytes - found.peak_bytes
            if spare_bytes >= 0 and (best is None or found.peak_bytes > best.peak_bytes):
                held.close()
                best, held = found, trial.pop_all()
        if 0 <= spare_bytes <= _CLOSE_SHARE * peak_bytes:
            break
        budget_bytes += spare_bytes
    if best is None:
        raise RuntimeError(f"no budget was found under which steps peak at {peak_bytes} bytes or less")
    stack.enter_context(held)
    return best


def _warm(steps: dict[str, Callable[[], None]]) -> None:
    """Run steps in turns of a few, until the ones whose bytes were counted are long past."""
    for _ in range(_NUM_WARMUP_TURNS):
        for step in steps.values():
            for _ in range(_NUM_WARMUP_STEPS):
                step()


def _time(steps: dict[str, Callable[[], None]], num_rounds: int) -> dict[str, list[float]]:
    """Time all in turns."""

    def fail(name: str, error: Exception) -> None:
        raise error

    return time_rounds(steps, num_rounds=num_rounds, on_error=fail, num_untimed=1)
