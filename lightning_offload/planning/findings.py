"""What sets the smallest feasible budget of a step, and what would lower it, with predictions.

The predictions are made by the planner itself, of a step that is changed accordingly: with a loss in chunks
(:mod:`~.logits`), or with an optimizer that goes through its parameters one by one where its ops are in the step. What
a smaller batch needs a graph does not say; who can record one at another size gives its floor.

Shortfalls: a step is forward and backward, and an optimizer's update is in it only where it runs within; of what would
lower the floor only what is set by the op at its peak is looked for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal

from lightning_offload.errors import BudgetInfeasibleError
from lightning_offload.graph.device_spec import DeviceSpec
from lightning_offload.graph.step_graph import StepGraph
from lightning_offload.planning.logits import chunked_floor, in_chunks
from lightning_offload.planning.planner import plan
from lightning_offload.planning.problem import Problem
from lightning_offload.planning.regions import largest_region
from lightning_offload.planning.request import PlanRequest, describe
from lightning_offload.planning.simulator import residency

RemedyKind = Literal["chunked-loss", "single-tensor-optimizer", "smaller-regions", "smaller-batch"]

ANY_DEVICE = DeviceSpec(
    name="any device",
    kind="cpu",
    memory_bytes=None,
    d2h_bytes_per_second=1e9,
    h2d_bytes_per_second=1e9,
    copy_interference=0.0,
    overhead_seconds=0.0,
)
"""One whose host holds all that is swapped: a floor depends on nothing else of a device."""

_FOREACH = "aten._foreach_"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LiveStorage:
    """A storage that is on the device when memory is at the floor's peak.

    Attributes:
        storage: Index in the graph.
        num_bytes: Size.
        op: What made it.
        module: The module of that; "" where none is known.
        phase: When that ran, forward or backward.
    """

    storage: int
    num_bytes: int
    op: str
    module: str
    phase: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """What would lower the floor.

    Attributes:
        kind: What it is.
        advice: The same, for a person.
        floor_bytes: The floor with it, predicted; None where only the direction is known.
        gain_bytes: By how much that is lower.
        floor_op: What sets the floor then.
        overhead: Share of step time that a plan within the same budget costs then; None where no budget or device is
            known, or the budget is below that floor too.
        num_chunks: Of a loss in chunks.
    """

    kind: RemedyKind
    advice: str
    floor_bytes: int | None = None
    gain_bytes: int | None = None
    floor_op: str | None = None
    overhead: float | None = None
    num_chunks: int | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FloorFinding:
    """What sets a step's floor.

    Attributes:
        floor_bytes: The smallest feasible budget.
        op: The op at its peak, with its module and phase.
        persistent_bytes: What was on the device before the step: parameters, buffers, the batch, the optimizer's state.
        live: What the step made and is there at the peak, the largest first.
        other_bytes: The rest of the floor: workspaces, what replays need, gradients that were not observed.
        remedies: What would lower it, the most effective first, those without a prediction last.
    """

    floor_bytes: int
    op: str
    persistent_bytes: int
    live: tuple[LiveStorage, ...]
    other_bytes: int
    remedies: tuple[Remedy, ...]


def explain_floor(
    graph: StepGraph,
    device: DeviceSpec | None = None,
    *,
    budget_bytes: int | None = None,
    smaller_batch: StepGraph | None = None,
    tell: Callable[[str], object] = lambda _: None,
) -> FloorFinding:
    """Say what sets a step's floor, and what would lower it.

    Args:
        graph: The step.
        device: Where it runs; None where that is not known, so that times are not predicted.
        budget_bytes: What plans are to meet whose step times are predicted; None for no such prediction.
        smaller_batch: The step at half the batch size, where somebody recorded it.
        tell: Called with what is done next, where that takes a while.
    """
    request = PlanRequest(Problem(graph), device or ANY_DEVICE, None)
    found = [
        _chunked_loss(request, budget_bytes if device is not None else None, tell),
        _single_tensors(request),
        _regions(request),
    ]
    remedies = [remedy for remedy in found if remedy is not None]
    remedies.append(_smaller_batch(request, smaller_batch))
    remedies.sort(key=lambda remedy: -(remedy.gain_bytes or 0))
    live = _live(request)
    persistent_bytes = request.problem.requested.persistent_bytes
    floor_bytes = request.floor.peak_bytes
    return FloorFinding(
        floor_bytes=floor_bytes,
        op=request.floor_op,
        persistent_bytes=persistent_bytes,
        live=live,
        other_bytes=floor_bytes - persistent_bytes - sum(each.num_bytes for each in live),
        remedies=tuple(remedies),
    )


def _live(request: PlanRequest) -> tuple[LiveStorage, ...]:
    """What the step made and is on the device at the floor's peak."""
    problem, actions, tick = request.problem, request.floor_actions, request.floor.peak_tick
    needs = residency(problem, actions)
    graph = problem.graph
    producer = {value.storage: value.producer for value in reversed(graph.values)}
    found = []
    for i, storage in enumerate(graph.storages):
        until = storage.death if i in actions else max(storage.death, problem.release.get(i, 0))
        is_back = i in actions and needs.needed_at.get(i, tick + 1) <= tick < needs.held_until[i]
        if storage.is_persistent or not (storage.birth <= tick < until or is_back):
            continue
        op = graph.ops[producer[i]] if producer.get(i, -1) >= 0 else None
        found.append(
            LiveStorage(
                storage=i,
                num_bytes=storage.num_bytes,
                op=op.name if op is not None else "",
                module=op.module if op is not None else "",
                phase=op.phase if op is not None else "",
            )
        )
    return tuple(sorted(found, key=lambda each: (-each.num_bytes, each.storage)))


def _chunked_loss(request: PlanRequest, budget_bytes: int | None, tell: Callable[[str], object]) -> Remedy | None:
    lower = chunked_floor(request.problem, request.device, request.lowest)
    if lower is None:
        return None
    timeline, overhead = lower.floor.timeline, None
    op = lower.problem.graph.op_at(timeline.peak_tick)
    if budget_bytes is not None:
        tell(f"planning the step with {lower.num_chunks} chunks")
        graph = in_chunks(request.problem.graph, lower.logits, lower.num_chunks)
        overhead = _overhead(graph, request.device, budget_bytes)
    return Remedy(
        kind="chunked-loss",
        advice=(
            f"{lower.logits.name}: train with chunked_loss=True, or compute the loss by "
            f"lightning_offload.chunked_linear_cross_entropy(..., num_chunks={lower.num_chunks}) or by another chunked "
            "or fused linear cross-entropy"
        ),
        floor_bytes=timeline.peak_bytes,
        gain_bytes=request.floor.peak_bytes - timeline.peak_bytes,
        floor_op=describe(op) if op is not None else None,
        overhead=overhead,
        num_chunks=lower.num_chunks,
    )


def _overhead(graph: StepGraph, device: DeviceSpec, budget_bytes: int) -> float | None:
    try:
        made = plan(graph, device, budget_bytes)
    except BudgetInfeasibleError:
        return None
    return made.predicted_step_seconds / made.plain_step_seconds - 1 if made.plain_step_seconds else None


def _single_tensors(request: PlanRequest) -> Remedy | None:
    op = request.problem.graph.op_at(request.floor.peak_tick)
    if op is None or not op.name.startswith(_FOREACH):
        return None
    lower = PlanRequest(Problem(one_by_one(request.problem.graph)), request.device, None)
    gain_bytes = request.floor.peak_bytes - lower.floor.peak_bytes
    if gain_bytes <= 0:
        return None
    return Remedy(
        kind="single-tensor-optimizer",
        advice="ops on all parameters at once set the floor: give the optimizer foreach=False, or fused=True",
        floor_bytes=lower.floor.peak_bytes,
        gain_bytes=gain_bytes,
        floor_op=lower.floor_op,
    )


def _regions(request: PlanRequest) -> Remedy | None:
    region = largest_region(request.problem.requested)
    return Remedy(kind="smaller-regions", advice=region.advice) if region is not None else None


def one_by_one(graph: StepGraph) -> StepGraph:
    """The step with foreach ops whose temporaries are there one at a time: of those that one makes, the largest."""
    storages = list(graph.storages)
    for op in graph.ops:
        if not op.name.startswith(_FOREACH):
            continue
        made = [s for v in op.outputs if _is_temporary(graph, s := graph.values[v].storage, op.tick)]
        for s in sorted(made, key=lambda s: -storages[s].num_bytes)[1:]:
            storages[s] = dataclasses.replace(storages[s], num_bytes=0)
    return dataclasses.replace(graph, storages=tuple(storages))


def _is_temporary(graph: StepGraph, storage: int, tick: int) -> bool:
    found = graph.storages[storage]
    return found.birth == tick and found.death < graph.num_ticks


def _smaller_batch(request: PlanRequest, smaller: StepGraph | None) -> Remedy:
    advice = "lower the batch size, or the size of the micro-batches of which gradients are accumulated"
    if smaller is None:
        return Remedy(kind="smaller-batch", advice=advice)
    lower = PlanRequest(Problem(smaller), request.device, None)
    return Remedy(
        kind="smaller-batch",
        advice=f"halve the batch, or {advice.removeprefix('lower the batch size, or ')}",
        floor_bytes=lower.floor.peak_bytes,
        gain_bytes=request.floor.peak_bytes - lower.floor.peak_bytes,
        floor_op=lower.floor_op,
    )
