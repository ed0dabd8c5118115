"""Whether what measured steps took calls for another plan: time and memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from lightning_offload.graph.device_spec import DeviceSpec
from lightning_offload.graph.memory_plan import MemoryPlan
from lightning_offload.graph.step_graph import StepGraph
from lightning_offload.planning.problem import Problem
from lightning_offload.planning.trace import simulate_plan

_STALL_FACTOR = 1.1  # stalls beyond this multiple of the predicted ones, and beyond
_SHARE = 0.02  # this share of the step, are worth another plan
_MUCH_FASTER, _MUCH_SLOWER = 0.9, 1.1


def links_were_wrong(plan: MemoryPlan, stall_seconds: float, *, is_slower: bool, is_faster: bool) -> bool:
    """Whether links that turned out slower or faster are worth another plan.

    Args:
        plan: What was executed.
        stall_seconds: Time that compute waited for copies.
        is_slower: Whether a link turned out slower than the plan counts on; that matters if it shows in stalls.
        is_faster: Whether one turned out faster; that matters if the plan costs time.
    """
    allowed = _STALL_FACTOR * plan.predicted_stall_seconds + _SHARE * plan.predicted_step_seconds
    is_costly = plan.predicted_step_seconds > (1 + _SHARE) * plan.plain_step_seconds
    return (is_slower and stall_seconds > allowed) or (is_faster and is_costly)


def compute_factor(plan: MemoryPlan, computing_seconds: float, before: float | None) -> float:
    """By how much the ops' durations are wrong on an accelerator; 1 as long as that is not clear.

    Ops timed one by one may have waited for the host, of whose part only an estimate is taken off; a step as a whole
    shows what they take back to back. A step that is slow once may have waited for the host, or for the allocator; one
    that is so again shows that the durations are those of another machine, or of a cooler one.

    Args:
        plan: What was executed.
        computing_seconds: What a step took, stalls aside.
        before: The same of the last measured step before it; None if that ran under another plan.
    """
    predicted = plan.predicted_step_seconds - plan.predicted_stall_seconds
    if 0 < computing_seconds < _MUCH_FASTER * predicted:
        return computing_seconds / predicted
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
