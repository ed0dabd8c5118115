"""A plugin that is told wrong figures, on hardware of a set speed: everything happens in virtual time.

The plugin believes a link's rates and the ops' durations; the lanes and the clock follow the true ones. Only who
measures is replaced (the link's calibration, the lanes, the step's clock), so what the plugin learns it learns by its
own means.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import _disable_current_modes

from lightning_offload import MemoryPlugin
from lightning_offload.capture.timing import scaled
from lightning_offload.errors import BudgetInfeasibleError
from lightning_offload.graph import DeviceSpec, MemoryPlan
from lightning_offload.planning.planner import plan as make_plan
from lightning_offload.planning.trace import follow
from lightning_offload.plugins import hardware, link_rates
from lightning_offload.plugins import step as run
from lightning_offload.plugins.shape_families import shape_of
from lightning_offload.tensors.observer import observe_all
from tests.engine.live_tracker import LiveStorageTracker
from tests.engine.test_slow_links import STEP_SECONDS, Subject, clocked_tiers, take_gradients
from tests.runtime.clocked_lanes import VirtualClock


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One training step.

    Attributes:
        plan: What was executed.
        overhead_seconds: What that plan costs in truth, beyond the plain step: simulated with the true figures.
        measured_seconds: What the step took in virtual time.
        peak_bytes: The true peak of live bytes.
        is_exact: Whether its gradients were those of plain PyTorch.
    """

    plan: MemoryPlan
    overhead_seconds: float
    measured_seconds: float
    peak_bytes: int
    is_exact: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Wrong:
    """By which factors the plugin's beliefs differ from the truth."""

    link: float = 1.0
    ops: float = 1.0


def true_device(subject: Subject, link: float) -> DeviceSpec:
    """An accelerator that needs so many steps to copy all that the step saves off it."""
    rate = subject.saved_bytes / (link * STEP_SECONDS)
    return DeviceSpec(
        name="a card", kind="cuda", memory_bytes=None, copy_interference=0.0, overhead_seconds=0.0,
        d2h_bytes_per_second=rate, h2d_bytes_per_second=0.8 * rate,
    )  # fmt: skip


@functools.cache
def budget_at(subject: Subject, device: DeviceSpec, height: float) -> int:
    """A budget at a height between the floor and the plain peak."""
    plain = make_plan(subject.graph, device, None).plain_peak_bytes
    try:
        make_plan(subject.graph, device, 1)
    except BudgetInfeasibleError as error:
        return int(error.floor_bytes + height * (plain - error.floor_bytes))
    raise AssertionError("one byte is enough for a step")


def train(subject: Subject, device: DeviceSpec, budget_bytes: int, wrong: Wrong, num_steps: int) -> list[Step]:
    """Train on a device whose figures the plugin has wrong."""
    believed = dataclasses.replace(
        device,
        d2h_bytes_per_second=wrong.link * device.d2h_bytes_per_second,
        h2d_bytes_per_second=wrong.link * device.h2d_bytes_per_second,
    )
    clock, tracker = VirtualClock(subject.graph), LiveStorageTracker()
    memory = MemoryPlugin(budget=f"{budget_bytes}B", device="cpu", tier="host", verify="never")
    graph = scaled(subject.graph, wrong.ops)
    placeholder = make_plan(graph, believed, None)  # a plan of an earlier run, for a device that is not this one
    plan = dataclasses.replace(placeholder, budget_bytes=budget_bytes)
    row = {"signature": shape_of(((), {})).signature, "graph": graph.to_json(), "plan": plan.to_json()}
    memory.load_state_dict({"schema": 1, "plans": [row]})
    steps = []
    with _in_virtual_time(clock, device, believed), memory, tracker:
        tracker.register(subject.model)
        for _ in range(num_steps):
            steps.append(_step(subject, device, memory, clock, tracker))
    return steps


def _step(
    subject: Subject, device: DeviceSpec, memory: MemoryPlugin, clock: VirtualClock, tracker: LiveStorageTracker
) -> Step:
    with _disable_current_modes():
        buffers = {key: tensor.clone() for key, tensor in subject.model.named_buffers()}
    torch.manual_seed(6)
    clock.restart()
    start = clock.now
    with tracker.window() as window, memory.step():
        plan = memory._steps.cache.entry.plan
        subject.loss(subject.model).backward()
    assert plan is not None
    memory.report()  # takes over what the step showed
    with _disable_current_modes():  # the tracker need not know of what is only compared
        subject.model.load_state_dict(buffers, strict=False)
        is_exact = all(map(torch.equal, take_gradients(subject.model), subject.gradients))
    return Step(
        plan=plan,
        overhead_seconds=follow(subject.graph, plan, device).step_seconds - STEP_SECONDS,
        measured_seconds=clock.now - start,
        peak_bytes=window.peak_bytes,
        is_exact=is_exact,
    )


@contextlib.contextmanager
def _in_virtual_time(clock: VirtualClock, device: DeviceSpec, believed: DeviceSpec) -> Iterator[None]:
    class Clock:
        """The step's clock."""

        def __init__(self, *_: Any, **__: Any) -> None:
            self._seconds = 0.0

        @contextlib.contextmanager
        def running(self) -> Iterator[None]:
            begin = clock.now
            yield
            self._seconds += clock.now - begin

        def backward_begins(self) -> None:
            pass

        def launch_times(self) -> None:
            pass

        def seconds(self) -> float:
            return self._seconds

    tiers = clocked_tiers(clock, device, lambda: 1.0)
    with (
        mock.patch.object(hardware, "tiers_for", return_value=tiers),
        mock.patch.object(hardware, "measure_spec", return_value=believed),
        mock.patch.object(run, "observe_all", lambda observers: observe_all((clock, *observers))),
        mock.patch.object(run, "StepClock", Clock),
        mock.patch.object(link_rates, "MIN_BYTES", 1),  # there are no latencies
        clock.timing_replays(),
    ):
        yield
