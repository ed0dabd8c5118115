"""Why a plan in force is given up, and whether what measured steps took calls for another one: time and memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

from lightning_offload.graph.device_spec import DeviceSpec
from lightning_offload.graph.memory_plan import MemoryPlan
from lightning_offload.graph.step_graph import StepGraph
from lightning_offload.planning.planner import least_quiet_seconds
from lightning_offload.planning.problem import Problem
from lightning_offload.planning.trace import simulate_plan

_STALL_FACTOR = 1.1  # stalls beyond this multiple of the predicted ones, and beyond
_SHARE = 0.02  # this share of the step, are worth another plan
_MUCH_FASTER, _MUCH_SLOWER = 0.9, 1.1  # ratios of a measured step to the predicted one: noise is less
_MAX_CORRECTIONS = 3  # plans made anew for one reason, before the last one stays
_SLIGHTLY_TIGHTER = 0.95  # of a peak that the device had room for only by giving back what it held in reserve
_SOON = 16  # planned steps, within which a second time is no accident

Reason = Literal[
    "recorded", "structure", "imported", "mismatch", "searched", "peak", "time", "host", "baseline", "gradients",
    "out of memory", "allocator", "hardware",
]  # fmt: skip
"""Why a plan is given up; :data:`REASONS` has them in words."""

REASONS: Mapping[Reason, str] = {
    "recorded": "the step was recorded again: its ops changed, or what it used was gone",
    "structure": "the model's structure changed",
    "imported": "the user gave another plan",
    "mismatch": "a replay gave other bits",
    "searched": "a plan made in haste had cost more than a thorough search",
    "peak": "a measured peak was above the predicted one",
    "time": "links or ops took other times than predicted",
    "host": "the device waited for the host",
    "baseline": "more or less than before was on the device beside the step",
    "gradients": "gradients of earlier steps were there",
    "out of memory": "the device ran out of memory",
    "allocator": "the allocator gave its reserve back again and again",
    "hardware": "links were measured, or tiers lost room",
}


Links = Literal["as planned", "slower", "faster"]
"""How fast links turned out to be, of what plans count on: one is slower, or none is and one is faster."""


@dataclasses.dataclass(slots=True)
class Corrections:
    """The plans of a specialization that are made again for what steps under them showed, a few times at most.

    Attributes:
        num_timed: Those since planned steps did not take the time they should.
        num_tightened: Those since the allocator had to give its reserve back again and again.
        computing_seconds: What the ops of the last measured step under the plan in force took, copies aside.
        waited_seconds: What the device waited for the host in its forward.
        mode_seconds: By how much a dispatch mode lengthens steps, where such steps have shown it.
        retried_at: The planned step in which the allocator last had to give its reserve back.
    """

    num_timed: int = 0
    num_tightened: int = 0
    computing_seconds: float | None = None
    waited_seconds: float | None = None
    mode_seconds: float | None = None
    retried_at: int | None = None

    def begin_plan(self) -> None:
        """Another plan comes into force."""
        self.computing_seconds = self.waited_seconds = None

    def by_time(
        self,
        plan: MemoryPlan,
        device: DeviceSpec,
        step_seconds: float,
        stall_seconds: float,
        waited_seconds: float = 0.0,
        links: Links = "as planned",
    ) -> float | None:
        """By how much the ops' durations are wrong, where a plan is worth making again; None where it is not.

        Args:
            plan: What was executed.
            device: What it was made for.
            step_seconds: What the step took.
            stall_seconds: The part of it in which compute waited for copies.
            waited_seconds: The part of it in which an accelerator waited for the host.
            links: How fast these turned out to be.
        """
        if self.num_timed >= _MAX_CORRECTIONS:
            return None
        is_wrong = links_were_wrong(plan, stall_seconds, links)
        factor = 1.0
        if device.kind != "cpu":  # whose ops are not launched: what was timed one by one is what they take
            busy = max(0.0, step_seconds - stall_seconds)
            computing = max(0.0, busy - waited_seconds)
            factor = compute_factor(plan, busy, computing, self.computing_seconds)
            self.computing_seconds = computing
        if factor == 1.0 and not is_wrong:
            return None
        self.num_timed += 1
        return factor

    def by_mode(self, plan: MemoryPlan, device: DeviceSpec, waited_seconds: float) -> bool:
        """Whether a plan is worth making again since its dispatch mode costs more than was thought.

        Args:
            plan: What was executed.
            device: What it was made for.
            waited_seconds: What the device waited in forward for the host and the mode there.
        """
        lasting = min(waited_seconds, self.waited_seconds) if self.waited_seconds is not None else 0.0
        self.waited_seconds = waited_seconds
        known_seconds = _MUCH_SLOWER * (self.mode_seconds or 0.0)
        if self.num_timed >= _MAX_CORRECTIONS or all(decision.action != "recompute" for decision in plan.decisions):
            return False
        least_seconds = least_quiet_seconds(plan, device, plan.budget_bytes) - plan.predicted_step_seconds
        if lasting <= max(known_seconds, least_seconds, _SHARE * plan.predicted_step_seconds):
            return False
        self.num_timed += 1
        self.mode_seconds = lasting
        return True

    def by_retries(self, plan: MemoryPlan, num_planned: int) -> int | None:
        """The bytes to plan for from now on, where the allocator gives its reserve back again and again; else None.

        Args:
            plan: What was executed.
            num_planned: Which step under it that was.
        """
        is_again = self.retried_at is not None and 0 <= num_planned - self.retried_at <= _SOON
        self.retried_at = num_planned
        if not is_again or self.num_tightened >= _MAX_CORRECTIONS:
            return None
        usable_bytes = max(plan.floor_bytes, int(_SLIGHTLY_TIGHTER * plan.predicted_peak_bytes))
        if usable_bytes >= plan.predicted_peak_bytes:
            return None
        self.num_tightened += 1
        self.retried_at = None
        return usable_bytes


def links_were_wrong(plan: MemoryPlan, stall_seconds: float, links: Links) -> bool:
    """Whether links that turned out slower or faster are worth another plan.

    Args:
        plan: What was executed.
        stall_seconds: Time that compute waited for copies.
        links: How fast they are; slower ones matter if that shows in stalls, faster ones if the plan costs time.
    """
    if links == "slower":
        return stall_seconds > _STALL_FACTOR * plan.predicted_stall_seconds + _SHARE * plan.predicted_step_seconds
    return links == "faster" and plan.predicted_step_seconds > (1 + _SHARE) * plan.plain_step_seconds


def compute_factor(plan: MemoryPlan, busy_seconds: float, computing_seconds: float, before: float | None) -> float:
    """By how much the ops' durations are wrong on an accelerator; 1 as long as that is not clear.

    Ops timed one by one may have waited for the host, of whose part only an estimate is taken off; a step as a whole
    shows what they take at most. A step that is slow once may have waited for the allocator; one that is so again, the
    host aside, shows that the durations are those of another machine, or of a cooler one.

    Args:
        plan: What was executed.
        busy_seconds: What a step took, stalls aside.
        computing_seconds: The same without what the device may have waited for the host.
        before: The latter of the last measured step before it; None if that ran under another plan.
    """
    predicted = plan.predicted_step_seconds - plan.predicted_stall_seconds
    if 0 < busy_seconds < _MUCH_FASTER * predicted:
        return busy_seconds / predicted
    lasting = min(computing_seconds, before) if before is not None else 0.0
    return lasting / predicted if lasting > _MUCH_SLOWER * predicted > 0 else 1.0


def with_unforeseen(
    graph: StepGraph, plan: MemoryPlan, device: DeviceSpec, peak_bytes: int, by_op: Sequence[int]
) -> tuple[StepGraph, int]:
    """The graph with what a measured step needed beyond what was predicted for it, op by op, as workspaces.

    Some memory is in no graph: compiled code holds what it was given until it is through. By how much a plan's peak is
    wrong then depends on where in the step that is, so that a margin that is right for one plan is not for the next.
    What is there all through the step is no op's, and stays a margin.

    Args:
        graph: The step, without a margin.
        plan: What was executed.
        device: What it was planned for.
        peak_bytes: Measured.
        by_op: The peak between the op before and each, measured; of another number of ops it tells nothing.

    Returns:
        The graph, and by how much the peak exceeds what is predicted of it now.
    """
    problem = Problem(graph)
    memory = simulate_plan(problem, plan.decisions, device).memory
    if not graph.ops or len(by_op) != len(graph.ops):
        return graph, max(0, peak_bytes - int(memory.max()))
    begins = np.concatenate(([0], problem.op_ticks[:-1] + 1))
    predicted = np.maximum.reduceat(memory[: problem.op_ticks[-1] + 1], begins)
    beyond = np.array(by_op, dtype=np.int64) - predicted
    beyond = np.maximum(0, beyond - max(0, int(beyond.min())))
    ops = (
        dataclasses.replace(op, workspace_bytes=op.workspace_bytes + more) if more else op
        for op, more in zip(graph.ops, beyond.tolist(), strict=True)
    )
    memory[problem.op_ticks] += beyond
    return dataclasses.replace(graph, ops=tuple(ops)), max(0, peak_bytes - int(memory.max()))
