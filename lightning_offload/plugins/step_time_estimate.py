"""What planned steps take on a host that computes, by those that ran: more than their ops were timed to take.

Ops are timed one by one. Between them there are the interpreter and autograd, which no op's duration has; replays
touch memory that forward found warm; and machines drift. So a plan's own figures are too short, by a few per cent for
large ops and by a multiple for tiny ones. The steps that run under the plan tell: a median of the last few is what
the next will take, and without what replays, copies and waiting took of it, what a plain step would.

An accelerator computes ops back to back while the host runs ahead, so there a step that takes other than predicted
tells of its ops: :mod:`~lightning_offload.plugins.replanning`. Where ops are small the host does not get ahead, the
less so the more it is asked for beside launching them: what the device then waits for it is no op's.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections import deque
from typing import NamedTuple

from lightning_offload.graph.device_spec import DeviceSpec
from lightning_offload.graph.memory_plan import MemoryPlan
from lightning_offload.graph.step_graph import StepGraph
from lightning_offload.planning.trace import follow

_NUM_LAST = 9  # steps whose median counts: odd, and few enough to follow a change
_NUM_FIRST = 3  # steps that one that was slow once does not decide
_MUCH = 0.1  # share of the step that reading of results takes, by which the host waits for the device
_UNEVEN = 0.1  # share of a part that it may take longer since not every op is launched as fast as others
_READING = frozenset(
    f"aten.{name}"
    for name in (
        "_local_scalar_dense.default", "equal.default", "nonzero.default", "masked_select.default", "_unique2.default",
        "unique_dim.default", "unique_consecutive.default", "repeat_interleave.Tensor",
    )
)  # fmt: skip
_COPYING = frozenset({"aten._to_copy.default", "aten.copy_.default"})


class StepTimes(NamedTuple):
    """What a step took by the host's clock, in seconds.

    Attributes:
        step: All of it.
        stall: The part in which compute waited for copies.
        replay: The part in which values were made again.
    """

    step: float
    stall: float
    replay: float


class Halves(NamedTuple):
    """Seconds of both parts of a step: until backward began, and from then on."""

    forward: float
    backward: float


class LaunchTimes(NamedTuple):
    """What an accelerator's step took until both parts were launched, and until both were computed.

    Attributes:
        host: The host, which launches.
        device: The device, from when it began with the part.
        is_one: Whether backward followed at once: a program that did something in between may have waited for the
            device, which had nothing left to do then.
    """

    host: Halves
    device: Halves
    is_one: bool

    def waits(self, graph: StepGraph, plan: MemoryPlan, stall_seconds: float) -> Halves:
        """For how long the device waited for the host, by when the host can have launched each op.

        What a part took the device much beyond what that explains is taken off: ops are slower than was thought, and
        the host may have waited for them, since a device's queue is not endless. Nothing is told of a part where the
        host reads a result of the device after much of it.

        Shortfall: that the device still computes the step before when a step begins is not known; then too much of
        forward passes for a wait.

        Args:
            graph: The step.
            plan: What was executed.
            stall_seconds: For how long it waited for copies.
        """
        ops = {phase: [op.seconds for op in graph.ops if op.phase == phase] for phase in Halves._fields}
        in_forward = sum(ops["forward"])
        in_backward = max(0.0, plan.predicted_step_seconds - in_forward)
        lead = max(0.0, self.device.forward - self.host.forward) if self.is_one else 0.0
        late = max(0.0, stall_seconds - plan.predicted_stall_seconds)
        forward = _wait(ops["forward"], in_forward, self.host.forward, self.device.forward, late)
        backward = _wait(ops["backward"], in_backward, self.host.backward - lead, self.device.backward, late)
        waits = Halves(max(0.0, forward - plan.predicted_stall_seconds), backward)
        return Halves(*(0.0 if _is_read_late(graph, p) else w for p, w in zip(Halves._fields, waits, strict=True)))


def _wait(ops: list[float], computing: float, launching: float, took: float, late: float) -> float:
    """What a device waits that computes ops one after the other, each no sooner than it is launched.

    Args:
        ops: What they take in proportion.
        computing: What all of them take.
        launching: What the host takes to launch them, each as long as the others.
        took: What the device took.
        late: What of that it may have waited for copies.
    """
    scale = computing / sum(ops) if any(ops) else 0.0
    left = end = computing
    for i, seconds in enumerate(ops):
        end = max(end, launching * (i + 1) / len(ops) + left)
        left -= scale * seconds
    end = max(end, launching)
    unexplained = max(0.0, took - late - (1 + _UNEVEN) * end)
    return max(0.0, min(end, took) - computing - unexplained)


def _is_read_late(graph: StepGraph, phase: str) -> bool:
    """Whether the host reads a result of the device after much of a part of the step."""
    total = read = 0.0
    for op in graph.ops:
        if op.phase == phase:
            total += op.seconds
            if op.name in _READING or (op.name in _COPYING and not op.outputs):  # a copy to the host makes nothing
                read = total
    return read > _MUCH * total


class Expected(NamedTuple):
    """What the coming steps take, in seconds.

    Attributes:
        step: Under the plan.
        plain: With everything kept.
    """

    step: float
    plain: float


@dataclasses.dataclass(slots=True)
class StepTimeEstimate:
    """The last steps under one plan."""

    _last: deque[StepTimes] = dataclasses.field(default_factory=lambda: deque(maxlen=_NUM_LAST))
    _slowdown_seconds: float | None = None
    _waited_seconds: float | None = None

    def note_waits(self, seconds: float) -> None:
        """A measured step has run in which an accelerator waited so long for the host."""
        self._waited_seconds = seconds if self._waited_seconds is None else min(seconds, self._waited_seconds)

    def note(self, times: StepTimes) -> None:
        """A step has run, and nothing about it was measured but these."""
        self._last.append(times)

    def expected(self, plan: MemoryPlan, graph: StepGraph, device: DeviceSpec) -> Expected:
        """What steps take under the plan: what it says itself, until a few have run under it.

        Args:
            plan: The plan.
            graph: The step that it was made for.
            device: The device that it was made for.
        """
        if len(self._last) < _NUM_FIRST:
            waited_seconds = self._waited_seconds or 0.0
            return Expected(plan.predicted_step_seconds + waited_seconds, plan.plain_step_seconds)
        if self._slowdown_seconds is None:
            self._slowdown_seconds = follow(graph, plan, device).slowdown_seconds if plan.decisions else 0.0
        step, stall, replay = (statistics.median(column) for column in zip(*self._last, strict=True))
        return Expected(step, max(0.0, step - stall - replay - self._slowdown_seconds))
