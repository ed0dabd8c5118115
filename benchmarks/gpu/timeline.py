"""Where the time of a planned step goes on a GPU: what its kernels take, when the device is idle, what the host takes.

A plain step and one under a budget are run in turns, by the host's clock: until forward returns, until backward does,
and until the device is through. Then a few of each are run under torch's profiler, which writes down when each kernel
ran; forward, backward and the end are told apart by kernels that do nothing but wait for a cycle. Time in which no
kernel runs between two such marks is idle: there the device waits for the host, or for a copy. Copies run beside.

The profiler makes the host slower, so idle times are those of its own steps, of which the one with the least is shown;
`profiled_seconds` is what that took. The largest gaps are in the notes, with the kernels around them. A device without
a profiler gives the host's figures alone.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch

from benchmarks.gpu.contest import MIN_PLANNING_STEPS, budget_bytes, budget_label
from benchmarks.gpu.models import workload
from benchmarks.pairs import quartiles, synchronize
from benchmarks.results import Measurements, Row
from benchmarks.workloads import Workload, plan_steps
from lightning_offload import MemoryPlugin

_NUM_SETTLING_STEPS = 8  # in which a plan may still be made again
_NUM_PROFILED = 3
_NUM_GAPS = 5
_MARK = "spin_kernel"

_Context = Callable[[], AbstractContextManager[object]]


class Span(NamedTuple):
    """What a stream did for a while.

    Attributes:
        start: In seconds.
        end: The same.
        name: The kernel, or the kind of copy.
    """

    start: float
    end: float
    name: str


class Gap(NamedTuple):
    """Time in which no kernel ran.

    Attributes:
        seconds: How long.
        phase: "forward" or "backward".
        before: The kernel that ran before it; "" where it is the first time of the phase.
        after: The one that ran after it.
    """

    seconds: float
    phase: str
    before: str
    after: str


class Busy(NamedTuple):
    """A profiled step.

    Attributes:
        seconds: From its beginning to its end.
        kernels: In which some kernel ran, by phase.
        idle: In which none did.
        copies: What copies to and from the host took, wherever they were beside kernels.
        gaps: The largest times in which no kernel ran, the largest first.
    """

    seconds: float
    kernels: dict[str, float]
    idle: dict[str, float]
    copies: float
    gaps: tuple[Gap, ...]


class _Took(NamedTuple):
    """By the host's clock, in seconds: until both parts of a step returned, and until the device was through."""

    host_forward: float
    host_backward: float
    step: float


def timeline(
    device: torch.device,
    *,
    quick: bool,
    model: str,
    title: str,
    budget: str,
    num_rounds: int,
    precision: str = "fp32",
    batch_size: int | None = None,
) -> Measurements:
    """Take a plain step and one under a budget apart; see the module's description.

    Args:
        device: Where.
        quick: Whether a tiny model and few rounds will do.
        model: Which model.
        title: What it is called in rows.
        budget: The budget, as contests write it.
        num_rounds: How often each takes its turn by the host's clock.
        precision: "fp32" or "bf16".
        batch_size: Samples in the batch, unless `quick`; the model's own size by default.
    """
    trained = workload(model, device, quick=quick, precision=precision, batch_size=None if quick else batch_size)
    found = Measurements(rows=[], config=trained.config, repeats=2 if quick else num_rounds)
    with MemoryPlugin(f"{budget_bytes(budget, trained.limits())}B", module=trained.model) as memory:
        ours = functools.partial(memory.step, *trained.batch)
        plan_steps(memory, functools.partial(trained.step, ours), at_least=MIN_PLANNING_STEPS)
        contexts: dict[str, _Context] = {"plain": nullcontext, budget_label(budget): ours}
        for context in contexts.values():
            for _ in range(_NUM_SETTLING_STEPS):
                _run(trained, context)
        times: dict[str, list[_Took]] = {name: [] for name in contexts}
        for _ in range(found.repeats):
            for name, context in contexts.items():
                times[name].append(_run(trained, context))
        for name, context in contexts.items():
            case = f"{title}, {name}, taken apart"
            for column, values in zip(_Took._fields, zip(*times[name], strict=True), strict=True):
                found.rows.append(Row(case=case, metric=f"{column}_seconds", value=quartiles(values)[1]))
                found.spread.setdefault(case, {})[f"{column}_seconds"] = quartiles(values)
            profiled = [_profiled(trained, context, device) for _ in range(1 if quick else _NUM_PROFILED)]
            known = [busy for busy in profiled if busy is not None]
            if known:
                _write(found, case, min(known, key=lambda busy: sum(busy.idle.values())))
    return found


def _run(trained: Workload, context: _Context, mark: Callable[[], None] = lambda: None) -> _Took:
    """Run a step, with a mark before it, before its backward and at its end."""
    trained.model.zero_grad(set_to_none=True)
    synchronize()
    begin = time.perf_counter()
    mark()
    with context():
        loss = trained.loss(trained.model, trained.batch)
        forward = time.perf_counter()
        mark()
        loss.backward()  # type: ignore[no-untyped-call]
        backward = time.perf_counter()
    mark()
    synchronize()
    return _Took(forward - begin, backward - forward, time.perf_counter() - begin)


def _profiled(trained: Workload, context: _Context, device: torch.device) -> Busy | None:
    """A step under the profiler; None where that sees no kernels."""
    activity = torch.profiler.ProfilerActivity.CUDA
    if device.type != "cuda" or activity not in torch.profiler.supported_activities():
        return None
    with torch.profiler.profile(activities=[activity]) as profiler:
        _run(trained, context, functools.partial(torch.cuda._sleep, 1))
    events: Any = profiler.events()
    spans = [
        Span(event.time_range.start / 1e6, event.time_range.end / 1e6, event.name)
        for event in events
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    return taken_apart(spans)


def taken_apart(spans: Sequence[Span]) -> Busy | None:
    """What a device did between three marks; None where they are not there.

    Args:
        spans: Of all streams, in any order.
    """
    marks = sorted(span.start for span in spans if _MARK in span.name)
    if len(marks) != 3:
        return None
    is_copy = {span: span.name.startswith("Memcpy") and "DtoD" not in span.name for span in spans}
    kernels = sorted(span for span in spans if not is_copy[span])
    idle, busy, gaps = dict.fromkeys(_PHASES, 0.0), dict.fromkeys(_PHASES, 0.0), list[Gap]()
    for phase, (begin, end) in zip(_PHASES, itertools.pairwise(marks), strict=True):
        now, before = begin, ""
        for span in kernels:
            if span.start >= end or span.end <= begin:
                continue
            if span.start > now:
                idle[phase] += span.start - now
                gaps.append(Gap(span.start - now, phase, before, span.name))
            now, before = max(now, min(span.end, end)), span.name
        if end > now:
            idle[phase] += end - now
            gaps.append(Gap(end - now, phase, before, ""))
        busy[phase] = end - begin - idle[phase]
    return Busy(
        seconds=marks[2] - marks[0],
        kernels=busy,
        idle=idle,
        copies=sum(span.end - span.start for span in spans if is_copy[span]),
        gaps=tuple(sorted(gaps, reverse=True)[:_NUM_GAPS]),
    )


_PHASES = ("forward", "backward")


def _write(found: Measurements, case: str, busy: Busy) -> None:
    figures = {
        "profiled_seconds": busy.seconds,
        "copies_seconds": busy.copies,
        **{f"{phase}_kernels_seconds": seconds for phase, seconds in busy.kernels.items()},
        **{f"{phase}_idle_seconds": seconds for phase, seconds in busy.idle.items()},
    }
    found.rows.extend(Row(case=case, metric=name, value=value) for name, value in figures.items())
    found.notes[case] = "idle longest: " + "; ".join(
        f"{1e3 * gap.seconds:.2f} ms in {gap.phase} between {gap.before[:60] or 'its beginning'} and "
        f"{gap.after[:60] or 'its end'}"
        for gap in busy.gaps
    )
