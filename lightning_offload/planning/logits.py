"""The logits of a step's cross-entropy, and the same step with that loss computed in chunks of rows.

What a linear layer over a vocabulary makes, the logarithms of the probabilities, and the gradients of both are as large
as the rows times the vocabulary. They are recognised by structure: a product of matrices with a parameter, whose result
goes, perhaps cast or copied, into ``_log_softmax``, which ``nll_loss`` reads, and into nothing else of its size (a
distillation, a softcap): what :func:`~lightning_offload.losses.chunked_linear_cross_entropy` can do instead. The step
in chunks has none of them. Its loss takes a share of two of them, and beside it what that function accumulates: the
gradients of the hidden states and, in float32, of the weight.

Shortfalls: a graph has no types, so whether logits are in half precision is told from sizes; a loss of other ops, fused
or compiled, is not recognised; times stay those without chunks.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from lightning_offload.graph.device_spec import DeviceSpec
from lightning_offload.graph.step_graph import Op, StepGraph
from lightning_offload.planning.floor import Floor, find_floor
from lightning_offload.planning.problem import Problem
from lightning_offload.planning.simulator import simulate

NUM_CHUNKS = 8
"""What ``chunked_linear_cross_entropy`` does by default."""

_MAX_CHUNKS = 64  # products of fewer rows are slow
_PRODUCTS = ("aten.mm.", "aten.addmm.", "aten.bmm.", "aten.baddbmm.", "aten.linear.", "aten.matmul.", "aten.dot.")
_COPIES = ("aten._to_copy.", "aten.clone.", "aten.copy.", "aten.slice.", "aten._unsafe_view.", "aten.slice_backward.")
_LOSS = (*_COPIES, "aten._log_softmax.", "aten.nll_loss")
_MAX_STEPS = 8  # copies between the product and the softmax
_NARROWEST = 4  # times smaller than the logits: what is as many numbers, in a narrower type


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Logits:
    """The logits of a cross-entropy, and all that is as large as they are.

    Attributes:
        module: Which module makes them.
        num_bytes: Their size.
        storages: All of that size: the logits, the logarithms of the probabilities, gradients, casts and copies.
        cut_bytes: What all rows at once would take of these in their place: the logits and the logarithms of the
            probabilities; for half precision two in float32, where CUDA needs one for float16.
        first_tick: When they are made.
        product_tick: When the first of the products is made that give the gradients of hidden states and weight.
        last_tick: When the last of these is read.
        accumulated_bytes: What chunks accumulate instead: the gradients of the hidden states and of the weight.
        part_bytes: What is there beside it while a part of the weight's gradient is added; 0 where that is in place.
    """

    module: str
    num_bytes: int
    storages: frozenset[int]
    cut_bytes: int
    first_tick: int
    product_tick: int
    last_tick: int
    accumulated_bytes: int
    part_bytes: int

    @property
    def name(self) -> str:
        """What to call them in a message."""
        return f"the logits of `{self.module}`" if self.module else "the logits"


@dataclasses.dataclass(frozen=True, slots=True)
class ChunkedFloor:
    """A prediction of the floor with a loss in chunks.

    Attributes:
        logits: Of which loss.
        num_chunks: Into how many parts its rows are cut.
        problem: The step in chunks.
        floor: Its floor.
    """

    logits: Logits
    num_chunks: int
    problem: Problem
    floor: Floor


def find_logits(graph: StepGraph) -> tuple[Logits, ...]:
    """The logits of a step's cross-entropies, in the order of the step."""
    found: list[Logits] = []
    for op in graph.ops:
        if op.name.startswith("aten._log_softmax.") and _is_scored(graph, op):
            product = _product(graph, op)
            logits = _logits(graph, *product, softmax=op) if product is not None else None
            found += [logits] if logits is not None else []
    return tuple(found)


def in_chunks(graph: StepGraph, logits: Logits, num_chunks: int) -> StepGraph:
    """The step as it would be with a loss computed in chunks of rows: what those take is a workspace of its ops.

    Args:
        graph: The step.
        logits: Of which loss.
        num_chunks: Into how many parts its rows are cut.
    """
    chunk_bytes = max(-(-logits.cut_bytes // num_chunks), -(-logits.num_bytes // num_chunks) + logits.part_bytes)

    def with_part(op: Op) -> Op:
        num_bytes = op.workspace_bytes + logits.accumulated_bytes
        num_bytes += chunk_bytes if op.tick < logits.product_tick else 0
        return dataclasses.replace(op, workspace_bytes=num_bytes)

    storages = tuple(
        dataclasses.replace(s, num_bytes=0) if i in logits.storages else s for i, s in enumerate(graph.storages)
    )
    ops = tuple(with_part(op) if logits.first_tick <= op.tick <= logits.last_tick else op for op in graph.ops)
    return dataclasses.replace(graph, storages=storages, ops=ops)


def chunked_floor(problem: Problem, device: DeviceSpec, floor: Floor) -> ChunkedFloor | None:
    """Predict by how much a loss in chunks would lower a step's floor; None where its logits do not set it.

    Args:
        problem: The step.
        device: Where it runs.
        floor: Its floor.

    Returns:
        With 8 chunks, or as many more, to 64, as it takes for something else to set the floor.
    """
    logits = next((each for each in find_logits(problem.graph) if _is_at(each, problem, floor)), None)
    if logits is None:
        return None
    found, num_chunks = None, NUM_CHUNKS
    while num_chunks <= _MAX_CHUNKS:
        graph = in_chunks(problem.graph, logits, num_chunks)
        workspaces = np.array([op.workspace_bytes for op in graph.ops], dtype=np.int64)
        chunked = problem.resized(graph, workspaces, problem.op_seconds)
        lower = find_floor(chunked, device, simulate(chunked, {}, device))
        if found is not None and lower.timeline.peak_bytes >= found.floor.timeline.peak_bytes:
            break
        found = ChunkedFloor(logits, num_chunks, chunked, lower)
        if not _is_at(logits, chunked, lower):
            break
        num_chunks *= 2
    if found is None or found.floor.timeline.peak_bytes >= floor.timeline.peak_bytes:
        return None
    return found


def _is_at(logits: Logits, problem: Problem, floor: Floor) -> bool:
    """Whether a floor's peak lies where logits are."""
    return logits.first_tick <= floor.timeline.peak_tick <= logits.last_tick


def _is_scored(graph: StepGraph, softmax: Op) -> bool:
    return any("nll_loss" in op.name and not set(op.inputs).isdisjoint(softmax.outputs) for op in graph.ops)


def _product(graph: StepGraph, softmax: Op) -> tuple[Op, int, list[int]] | None:
    """The product that makes what a softmax reads, its parameter's storage, and the storages on the way."""
    value, between = softmax.inputs[0], list[int]()
    for _ in range(_MAX_STEPS):
        between.append(graph.values[value].storage)
        producer = graph.values[value].producer
        if producer < 0:
            return None
        op = graph.ops[producer]
        if op.name.startswith(_PRODUCTS):
            parameter = _parameter(graph, op)
            return (op, parameter, between) if parameter is not None else None
        if not op.name.startswith(_COPIES) or not op.inputs:
            return None
        value = max(op.inputs, key=lambda v: graph.storages[graph.values[v].storage].num_bytes)
    return None


def _parameter(graph: StepGraph, product: Op) -> int | None:
    """The storage of the largest parameter, or cast of one, that a product reads beside what is made in the step."""
    external = [s for v in product.inputs if (s := _external_storage(graph, v)) is not None]
    if not external or len(external) == len(product.inputs):
        return None
    return max(external, key=lambda s: graph.storages[s].num_bytes)


def _external_storage(graph: StepGraph, value: int) -> int | None:
    """The storage of a value that was there before the step, or is a cast of one that was."""
    storage, producer = graph.values[value].storage, graph.values[value].producer
    if graph.storages[storage].is_persistent:
        return storage
    if producer >= 0 and graph.ops[producer].name.startswith("aten._to_copy."):
        source = graph.values[graph.ops[producer].inputs[0]].storage
        return storage if graph.storages[source].is_persistent else None
    return None


def _logits(graph: StepGraph, product: Op, parameter: int, between: list[int], *, softmax: Op) -> Logits | None:
    sizes, values = graph.storages, graph.values
    made = values[product.outputs[0]].storage
    num_bytes = sizes[made].num_bytes
    known = {v for v, value in enumerate(values) if value.storage in between and not sizes[value.storage].is_persistent}
    storages, last_tick = {values[v].storage for v in known}, softmax.tick
    is_half = _is_half(graph, product, parameter, softmax)
    product_tick = accumulated = part = 0
    for op in graph.ops:
        if op.tick <= product.tick or known.isdisjoint(op.inputs):
            continue
        last_tick = max(last_tick, op.tick)
        if op.name.startswith(_PRODUCTS):
            product_tick = product_tick or op.tick
            made_bytes = sum(sizes[values[v].storage].num_bytes for v in op.outputs)
            is_weight = 2 * abs(made_bytes - sizes[parameter].num_bytes) < made_bytes
            wider = made_bytes if is_half and is_weight else 0  # in float32, and each part in half precision
            accumulated, part = accumulated + made_bytes + wider, max(part, wider)
            continue
        large = {v for v in op.outputs if _NARROWEST * sizes[values[v].storage].num_bytes >= num_bytes}
        if large and op.phase == "forward" and not op.name.startswith(_LOSS):
            return None
        known |= large
        storages |= {values[v].storage for v in large}
    return Logits(
        module=product.module,
        num_bytes=num_bytes,
        storages=frozenset(storages),
        cut_bytes=(5 if is_half else 2) * num_bytes,
        first_tick=product.tick,
        product_tick=product_tick or last_tick + 1,
        last_tick=last_tick,
        accumulated_bytes=accumulated,
        part_bytes=part,
    )


def _is_half(graph: StepGraph, product: Op, parameter: int, softmax: Op) -> bool:
    """Whether logits are numbers of two bytes: they are cast to something wider, or sizes say so.

    With rows from the targets, which are int64, ``logits * hidden / weight`` is the square of the rows times that size.
    """
    size = [storage.num_bytes for storage in graph.storages]
    num_bytes = size[graph.values[product.outputs[0]].storage]
    if size[graph.values[softmax.outputs[0]].storage] > num_bytes:
        return True
    loss = next(op for op in graph.ops if "nll_loss" in op.name and not set(op.inputs).isdisjoint(softmax.outputs))
    targets = [graph.values[v].storage for v in loss.inputs if v not in softmax.outputs]
    hidden = max(size[graph.values[v].storage] for v in product.inputs if _external_storage(graph, v) is None)
    num_rows = size[targets[0]] / 8 if targets else 0
    return num_rows > 0 and num_bytes * hidden / (size[parameter] * num_rows**2) < 3
