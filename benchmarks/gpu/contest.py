"""One model in several ways, side by side: plainly, under budgets, and by PyTorch's own means to save memory.

All contenders train the same model on the same batch in one process and take turns, after every plan is final. In a
turn of the first kind the device is waited for after each step, as where a program reads every loss. In one of the
second kind, whose figures begin with `run_`, several steps follow one another and only the last is waited for, so that
the host may be ahead of the device.

A budget is written `h=0.5` (that share of the way from the smallest feasible budget to the plain peak),
`activations=0.4` (the plain peak less the rest of the bytes that autograd saves), `peak=save_on_cpu` (what steps by
that means were measured to need, or the smallest feasible budget where that is more), or `fits` (more than the plain
step needs). A contender that fails is noted and leaves; the others go on.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from benchmarks.checkpoints import BlockCheckpoints, blocks_of
from benchmarks.gpu.memory import Peak, free_memory, measure_peak
from benchmarks.gpu.models import workload
from benchmarks.pairs import PairedTimes, Ratio, quartiles, ratio_of, time_rounds
from benchmarks.results import Measurements, Row, error_row
from benchmarks.workloads import Limits, Workload, plan_steps
from lightning_offload import MemoryPlugin

if TYPE_CHECKING:
    from lightning_offload.plugins.report import Report

_PLAIN = "plain"
MIN_PLANNING_STEPS = 6
_NUM_WARMUP_STEPS = 2
_NUM_STEPS_OF_RUN = 6
_FIGURES = (
    "budget_bytes", "floor_bytes", "plain_peak_bytes", "predicted_peak_bytes", "measured_peak_bytes", "kept_bytes",
    "swapped_bytes", "recomputed_bytes", "host_peak_bytes", "host_bytes", "pinned_bytes", "host_waste",
    "disk_peak_bytes", "plain_step_seconds", "predicted_step_seconds", "bound_seconds", "stall_seconds",
    "predicted_stall_seconds", "num_mismatched",
)  # fmt: skip
"""What is taken over from a report, as far as it has it."""

_RENAMED = {
    "plain_step_seconds": "predicted_plain_step_seconds",
    "plain_peak_bytes": "predicted_plain_peak_bytes",
    "measured_peak_bytes": "reported_peak_bytes",
}
_LABELS = {"fits": "budget fits the plain step", "activations=0.4": "40% of its activation bytes"}


PEERS = ("checkpoint per block", "selective checkpoint", "save_on_cpu")
"""PyTorch's own means; the second keeps the outputs of matrix products, convolutions and attention."""


def budget_bytes(text: str, limits: Limits, peer_peaks: Mapping[str, int] | None = None) -> int:
    """Return the budget that a text stands for.

    Args:
        text: As above.
        limits: Those of the step.
        peer_peaks: What peers need, by name.

    Raises:
        ValueError: It is not understood.
    """
    kind, _, share = text.partition("=")
    if kind == "fits":
        return limits.roomy()
    if kind == "h":
        return limits.budget(float(share))
    if kind == "activations":
        return max(limits.floor_bytes, limits.plain_peak_bytes - round((1 - float(share)) * limits.saved_bytes))
    if kind == "peak" and peer_peaks and share in peer_peaks:
        return max(limits.floor_bytes, peer_peaks[share])
    peers = ", ".join(f"'peak={name}'" for name in PEERS)
    raise ValueError(
        f"budget {text!r} is not understood: write 'h=0.5', 'activations=0.4', 'fits' or, of peers that take part "
        f"and did not fail, {peers}"
    )


def budget_label(text: str) -> str:
    """Return what a budget is called in rows."""
    kind, _, of = text.partition("=")
    return f"at the peak of {of}" if kind == "peak" else _LABELS.get(text, text.replace("=", " = "))


@dataclass(slots=True, kw_only=True)
class _Contender:
    """One way to train.

    Attributes:
        title: What its rows are called.
        step: Runs one step.
        memory: The plugin, if it is under a budget.
        goal: Largest good ratio to plain, if there is a goal.
    """

    title: str
    step: Callable[[], None]
    memory: MemoryPlugin | None = None
    goal: float | None = None


@dataclass(slots=True, kw_only=True)
class _Contest:
    """The contenders and what was found out about them."""

    title: str
    workload: Workload
    contenders: dict[str, _Contender] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    spread: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)

    def enter(self, name: str, contender: _Contender, warm_up: Callable[[], None]) -> None:
        """Let a contender take part if its warm-up succeeds."""
        try:
            warm_up()
        except Exception as error:
            self.drop(name, contender, error)
        else:
            self.contenders[name] = contender

    def drop(self, name: str, contender: _Contender, error: Exception) -> None:
        """Note why a contender failed and go on without it."""
        traceback.print_exception(error, file=sys.stderr)
        self.contenders.pop(name, None)
        self.rows.append(error_row(contender.title))
        self.notes[contender.title] = f"{type(error).__name__}: {error}"[:300]
        if contender.memory is not None:
            contender.memory.detach()
        error.__traceback__ = None
        self.workload.model.zero_grad(set_to_none=True)
        free_memory(self.workload.batch[0].device)

    def note(self, title: str, **figures: float | None) -> None:
        """Add the figures that are known."""
        self.rows += [Row(case=title, metric=name, value=value) for name, value in figures.items() if value is not None]


def contest(
    device: torch.device,
    *,
    quick: bool,
    model: str,
    title: str,
    budgets: Sequence[str],
    peers: Sequence[str],
    num_rounds: int,
    goals: dict[str, float] | None = None,
    precision: str = "fp32",
    batch_size: int | None = None,
) -> Measurements:
    """Measure one model in several ways.

    Args:
        device: Where.
        quick: Whether a tiny model and few rounds will do.
        model: Which model.
        title: What it is called in rows.
        budgets: The budgets.
        peers: Which of :data:`PEERS` take part; if any do, the plain step has rows of its own.
        num_rounds: How often each takes its turn with one step; with several in a row half as often.
        goals: For some budgets, the largest ratio to the plain step that is good enough.
        precision: "fp32" or "bf16".
        batch_size: Samples in the batch, unless `quick`; the model's own size by default.
    """
    trained = workload(model, device, quick=quick, precision=precision, batch_size=None if quick else batch_size)
    found = _Contest(title=title, workload=trained)
    with contextlib.ExitStack() as stack:
        limits, peer_peaks = trained.limits(), dict[str, int]()
        plain = _Contender(title=f"{title}, plain", step=trained.step)
        found.enter(_PLAIN, plain, lambda: _warm_up(plain.step))
        if peers:
            _enter_peers(found, peers)
            peer_peaks = {name: peak.allocated_bytes for name, peak in _peaks(found) if name in PEERS}
        for text in budgets:
            if f"{title}, {text.removeprefix('peak=')}" not in found.notes:  # a peer that has failed
                _enter_budget(found, stack, text, budget_bytes(text, limits, peer_peaks), (goals or {}).get(text))
        times = _time(found, 2 if quick else num_rounds)
        runs = _time_runs(found, 2 if quick else (num_rounds + 1) // 2, 2 if quick else _NUM_STEPS_OF_RUN)
        reports = {name: c.memory.report() for name, c in found.contenders.items() if c.memory is not None}
        peaks = dict(_peaks(found))
    _write_rows(found, times, runs, peaks, reports, limits, with_plain=bool(peers))
    rounds = len(times[_PLAIN])
    return Measurements(
        rows=found.rows, config=trained.config, repeats=rounds, spread=found.spread, notes=found.notes
    )  # fmt: skip


def _enter_budget(
    found: _Contest, stack: contextlib.ExitStack, text: str, num_bytes: int, goal: float | None
) -> None:  # fmt: skip
    trained = found.workload
    memory = stack.enter_context(MemoryPlugin(f"{num_bytes}B", module=trained.model))
    step = functools.partial(trained.managed_step, memory)
    contender = _Contender(title=f"{found.title}, {budget_label(text)}", step=step, memory=memory, goal=goal)
    found.enter(text, contender, lambda: plan_steps(memory, step, at_least=MIN_PLANNING_STEPS))


def _enter_peers(found: _Contest, names: Sequence[str]) -> None:
    checkpoints = BlockCheckpoints(blocks_of(found.workload.model))
    is_pinned = found.workload.batch[0].device.type == "cuda"
    contexts: tuple[Callable[[], AbstractContextManager[object]], ...] = (
        checkpoints.on, checkpoints.selective,
        functools.partial(torch.autograd.graph.save_on_cpu, pin_memory=is_pinned),
    )  # fmt: skip
    for name, context in zip(PEERS, contexts, strict=True):
        if name not in names:
            continue
        step = functools.partial(found.workload.step, context)
        contender = _Contender(title=f"{found.title}, {name}", step=step)
        found.enter(name, contender, functools.partial(_warm_up, step))


def _warm_up(step: Callable[[], None]) -> None:
    for _ in range(_NUM_WARMUP_STEPS):
        step()


def _time(found: _Contest, num_rounds: int) -> dict[str, list[float]]:
    """Time all contenders in turns; the first round, in which the allocator settles, does not count."""
    steps = {name: contender.step for name, contender in found.contenders.items()}

    def on_error(name: str, error: Exception) -> None:
        found.drop(name, found.contenders[name], error)

    time_rounds(steps, num_rounds=1, on_error=on_error)
    left = {name: step for name, step in steps.items() if name in found.contenders}
    return time_rounds(left, num_rounds=num_rounds, on_error=on_error)


def _time_runs(found: _Contest, num_rounds: int, num_steps: int) -> dict[str, list[float]]:
    """Time several steps in a row, after one that still finds what the contender before left.

    Who fails, as one may whose host is ahead of the device, is without these figures, and that is noted.
    """
    steps = {name: contender.step for name, contender in found.contenders.items()}

    def on_error(name: str, error: Exception) -> None:
        traceback.print_exception(error, file=sys.stderr)
        found.notes[found.contenders[name].title] = f"several steps in a row: {type(error).__name__}: {error}"[:300]
        error.__traceback__ = None

    return time_rounds(steps, num_rounds=num_rounds, num_steps=num_steps, num_untimed=1, on_error=on_error)


def _peaks(found: _Contest) -> Iterator[tuple[str, Peak]]:
    for name, contender in list(found.contenders.items()):
        try:
            yield name, measure_peak(found.workload, contender.step)
        except Exception as error:
            found.drop(name, contender, error)


def _write_rows(
    found: _Contest,
    times: dict[str, list[float]],
    runs: dict[str, list[float]],
    peaks: dict[str, Peak],
    reports: dict[str, Report],
    limits: Limits,
    *,
    with_plain: bool,
) -> None:
    """Write what was measured as rows: ratios to the plain step of the same round, times, peaks and predictions."""
    for name, contender in found.contenders.items():
        if name == _PLAIN and not with_plain:
            continue
        title, seconds, peak = contender.title, times[name], peaks[name]
        if name != _PLAIN:
            ratio = _ratio(times, name)
            found.rows.append(Row(case=title, metric="ratio", value=ratio.median, goal=contender.goal))
            found.note(title, ratio_low=ratio.low, ratio_high=ratio.high)
            if name in runs and _PLAIN in runs:
                run_ratio = _ratio(runs, name)
                found.note(
                    title, run_ratio=run_ratio.median, run_ratio_low=run_ratio.low, run_ratio_high=run_ratio.high
                )
            found.note(title, plain_step_seconds=quartiles(times[_PLAIN])[1])
        found.spread[title] = {"step_seconds": quartiles(seconds)}
        if name in runs:
            found.spread[title]["run_step_seconds"] = quartiles(runs[name])
            found.note(title, run_step_seconds=quartiles(runs[name])[1])
        found.note(
            title, step_seconds=quartiles(seconds)[1], peak_bytes=peak.allocated_bytes,
            reserved_bytes=peak.reserved_bytes, peak_share=limits.height(peak.allocated_bytes),
        )  # fmt: skip
        if name in reports:
            figures = {figure: getattr(reports[name], figure, None) for figure in _FIGURES}
            found.note(title, **{_RENAMED.get(figure, figure): value for figure, value in figures.items()})


def _ratio(times: Mapping[str, Sequence[float]], name: str) -> Ratio:
    return ratio_of(PairedTimes(plain_seconds=tuple(times[_PLAIN]), other_seconds=tuple(times[name])))
