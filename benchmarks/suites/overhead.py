"""What memory management costs in time: with nothing to do, at half of what can be saved, and per op.

Every case trains two copies of a model in turns, a plain one and one under management. The peers, PyTorch's
per-block checkpointing and `save_on_cpu`, run on the same model and are there for reading; where a peak lies
between the smallest feasible budget (0) and the plain peak (1) is its `peak_share`.
"""

from __future__ import annotations

import functools
import statistics
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from rich.progress import Progress

from benchmarks import environment, workloads
from benchmarks.checkpoints import BlockCheckpoints, blocks_of
from benchmarks.gpu.memory import measure_peak
from benchmarks.pairs import Collector, quartiles
from benchmarks.results import Measurements, Options, Row
from benchmarks.workloads import Limits, Workload, plan_steps
from lightning_offload import MemoryPlugin
from lightning_offload.plugins.devices import measure_rates

if TYPE_CHECKING:
    from lightning_offload.plugins.report import Report

TITLE = "Step time against plain PyTorch"

_FITS_GOAL = 1.03
_HALF_GOAL = 1.15
_DISK_STALL_GOAL = 0.25  # of the time that the transfers take
_RECURRENCE_GOAL = 3.0
_RECORDING_GOAL = 60.0  # microseconds per op
_NUM_CASES = 12
_NUM_WARMUP_STEPS = 2
_NUM_STALL_STEPS = 11
_LINK_BYTES = 128 << 20
_TINY_ELEMENTS = 32
_SMALL_ELEMENTS = 1 << 15  # 128 KiB, large enough for the planner to bother

_Make = Callable[[], Workload]
_Context = Callable[[], AbstractContextManager[object]]


def run(options: Options, progress: Progress) -> Measurements:
    """Measure all cases; see the module's description."""
    device, quick = environment.device(), options.quick
    task = progress.add_task("overhead", total=_NUM_CASES * options.num_pairs)
    collector = Collector(num_pairs=options.num_pairs, progress=progress, task=task)
    resnet = functools.partial(workloads.demo_resnet, device, quick=quick)
    gpt2 = functools.partial(workloads.gpt2, device, quick=quick)
    tiny = functools.partial(workloads.many_ops, device, num_elements=_TINY_ELEMENTS, quick=quick)
    recurrence = functools.partial(workloads.recurrence, device, quick=quick)
    small = functools.partial(workloads.many_ops, device, num_elements=_SMALL_ELEMENTS, quick=quick)

    limits = _managed(collector, "ResNet-50, budget fits the plain step", resnet, None, _FITS_GOAL)
    _managed(collector, "GPT-2, budget fits the plain step", gpt2, None, _FITS_GOAL)
    _managed(collector, "ResNet-50, half of the savings", resnet, 0.5, _HALF_GOAL)
    for policy in ("auto", "all-swap"):
        case = f"ResNet-50 on disk, a quarter of the way up from the floor, {policy}"
        _managed(collector, case, resnet, 0.25, None, policy=policy, tier="disk")
    _peer(collector, "ResNet-50, checkpoint per block", resnet, _checkpoint, limits)
    on_cpu = functools.partial(torch.autograd.graph.save_on_cpu, pin_memory=device.type == "cuda")
    _peer(collector, "ResNet-50, save_on_cpu", resnet, lambda _: on_cpu, limits)
    _managed(collector, "tiny ops, all kept", tiny, None, None, per_op=True)
    _managed(collector, "small ops, half of the savings", small, 0.5, None, per_op=True)

    _recording(collector, "recurrence of 17,000 tiny ops, recorded", recurrence)
    for policy, steady_goal in (("auto", _RECURRENCE_GOAL), ("all-swap", None)):
        case = f"recurrence of 17,000 tiny ops, half of the savings, {policy}"
        _managed(collector, case, recurrence, 0.5, steady_goal, per_op=True, policy=policy)

    named = {"recurrence": recurrence, "resnet50": resnet, "gpt2": gpt2, "tiny_ops": tiny, "small_ops": small}
    config: dict[str, Any] = {name: make().config for name, make in named.items()}
    return Measurements(rows=collector.rows, config=config, repeats=options.num_pairs, spread=collector.spread)


def _managed(
    collector: Collector,
    case: str,
    make: _Make,
    height: float | None,
    goal: float | None,
    *,
    per_op: bool = False,
    policy: str = "auto",
    tier: str = "auto",
) -> Limits:
    """Compare a plain step with one under a budget, and return what the budget was chosen from.

    Args:
        collector: Takes the figures.
        case: What they are called.
        make: Makes the workload.
        height: Of the budget, between floor (0) and plain peak (1); None for one that the plain step fits in.
        goal: Largest good ratio.
        per_op: Whether times by op are told, too.
        policy: Who plans.
        tier: Where swapped tensors go.
    """
    collector.progress.update(collector.task, description=case)
    plain, managed = make(), make()
    _warm_up(plain.step)  # what it leaves on the device is beside the managed steps, and counts in their budget
    limits = managed.limits()
    budget_bytes = limits.roomy() if height is None else limits.budget(height)
    with MemoryPlugin(f"{budget_bytes}B", policy=policy, tier=tier, module=managed.model) as memory:
        step = functools.partial(managed.managed_step, memory)
        plan_steps(memory, step)
        times = collector.time(case, plain.step, step, goal)
        report = memory.report()
        peak_bytes = measure_peak(managed, step).allocated_bytes
        if tier == "disk":
            _note_disk(collector, case, memory, step)
    _note_report(collector, case, report, limits, peak_bytes)
    if per_op:
        num_ops = workloads.count_ops(plain)
        for name, seconds in (("plain", times.plain_seconds), ("managed", times.other_seconds)):
            microseconds = quartiles(seconds)[1] * 1e6 / num_ops
            collector.note(case, **{f"{name}_host_microseconds_per_op": microseconds})
    return limits


def _recording(collector: Collector, case: str, make: _Make) -> None:
    """Compare a plain step with the first of its kind, which is recorded; each is, as the one before is forgotten."""
    collector.progress.update(collector.task, description=case)
    plain, managed = make(), make()
    with MemoryPlugin("1TiB", module=managed.model) as memory:

        def record() -> None:
            managed.managed_step(memory)
            memory._steps.finish()  # as the next step would, before it begins

        _warm_up(plain.step)
        record()
        times = collector.time(case, plain.step, record, None, prepare=memory.forget)
    num_ops = workloads.count_ops(plain)
    microseconds = {
        name: quartiles(seconds)[1] * 1e6 / num_ops
        for name, seconds in (("plain", times.plain_seconds), ("recording", times.other_seconds))
    }
    collector.note(case, plain_host_microseconds_per_op=microseconds["plain"])
    metric = "recording_host_microseconds_per_op"
    collector.rows.append(Row(case=case, metric=metric, value=microseconds["recording"], goal=_RECORDING_GOAL))


def _note_disk(collector: Collector, case: str, memory: MemoryPlugin, step: Callable[[], None]) -> None:
    """Note how much of the time that the disk takes is waited for, over a few steps."""
    stalls = []
    for _ in range(_NUM_STALL_STEPS):
        step()
        stalls.append(memory.report().stall_seconds)
    device = memory.device
    assert device is not None
    rates = measure_rates(device, tempfile.gettempdir(), num_bytes=_LINK_BYTES)
    swapped_bytes = memory.report().swapped_bytes
    assert rates.disk_write_bytes_per_second is not None
    assert rates.disk_read_bytes_per_second is not None
    transfer_seconds = swapped_bytes / rates.disk_write_bytes_per_second
    transfer_seconds += swapped_bytes / rates.disk_read_bytes_per_second
    stall_seconds = statistics.median(stalls)
    share = stall_seconds / max(transfer_seconds, 1e-9)
    collector.rows.append(Row(case=case, metric="stall_share_of_transfers", value=share, goal=_DISK_STALL_GOAL))
    collector.note(case, median_stall_seconds=stall_seconds, disk_transfer_seconds=transfer_seconds)


def _peer(
    collector: Collector, case: str, make: _Make, context_of: Callable[[Workload], _Context], limits: Limits
) -> None:
    """Compare a plain step with another way to save memory."""
    collector.progress.update(collector.task, description=case)
    plain, peer = make(), make()
    _warm_up(plain.step)
    step = functools.partial(peer.step, context_of(peer))
    _warm_up(step)
    collector.time(case, plain.step, step, None)
    peak_bytes = measure_peak(peer, step).allocated_bytes
    collector.note(case, peak_bytes=peak_bytes, peak_share=limits.height(peak_bytes))


def _checkpoint(workload: Workload) -> _Context:
    return BlockCheckpoints(blocks_of(workload.model)).on


def _warm_up(step: Callable[[], None]) -> None:
    for _ in range(_NUM_WARMUP_STEPS):
        step()


def _note_report(collector: Collector, case: str, report: Report, limits: Limits, peak_bytes: int) -> None:
    """Note the plan's figures, of which those not known are left out."""
    figures = {
        "budget_bytes": report.budget_bytes,
        "floor_bytes": limits.floor_bytes,
        "plain_peak_bytes": limits.plain_peak_bytes,
        "peak_bytes": peak_bytes,
        "predicted_peak_bytes": report.predicted_peak_bytes,
        "peak_share": limits.height(peak_bytes),
        "kept_bytes": report.kept_bytes,
        "swapped_bytes": report.swapped_bytes,
        "recomputed_bytes": report.recomputed_bytes,
        "predicted_plain_step_seconds": report.plain_step_seconds,
        "predicted_step_seconds": report.predicted_step_seconds,
        "stall_seconds": report.stall_seconds,
    }
    collector.note(case, **{name: value for name, value in figures.items() if value is not None})
