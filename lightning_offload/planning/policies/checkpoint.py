"""Activation checkpointing: only the inputs of segments are kept, and what a segment saved is recomputed from them.

Chen, Xu, Zhang, Guestrin, "Training Deep Nets with Sublinear Memory Cost", arXiv 1604.06174; in PyTorch as
``torch.utils.checkpoint``. ``checkpoint`` makes each repeated block of the network a segment, which is what libraries
of models do. ``checkpoint-sqrt`` joins n of them to the square root of n segments, which the paper shows to need
memory in the order of the square root of the depth at the cost of one more forward.

Departures. Nothing is wrapped, so no module needs to be edited: a segment is a set of ops, found by the names of
modules that repeat (:mod:`~.segments`), and in a network without blocks forward is cut into as many parts of equal
numbers of layers as the square root of their number, where the fewest bytes cross, by both policies. A checkpoint is a
saved storage: where a segment's input is not saved by anybody, the saved storages that it is made of are kept in its
place. A replay runs only the ops that lead to what is asked for, and memoises what the segment saved on the way,
so no op is run twice, and none whose result nobody needs. What is outside of all segments or cannot be replayed is
kept. The budget changes nothing.
"""

from __future__ import annotations

from lightning_offload.graph.memory_plan import MemoryPlan
from lightning_offload.planning.policies.fitting import fixed_plan
from lightning_offload.planning.policies.layers import layers_of
from lightning_offload.planning.policies.segments import by_block, equal_parts, grouped, recompute_inside
from lightning_offload.planning.request import PlanRequest


def checkpoint(request: PlanRequest) -> MemoryPlan:
    """Recompute each block from its inputs."""
    layers, found = layers_of(request.problem), by_block(request.problem)
    parts = equal_parts(layers) if found is None else found
    return fixed_plan(request, "checkpoint", recompute_inside(layers, parts))


def checkpoint_sqrt(request: PlanRequest) -> MemoryPlan:
    """Recompute as many segments as the square root of the number of blocks, or of layers."""
    layers, found = layers_of(request.problem), by_block(request.problem)
    parts = equal_parts(layers) if found is None else grouped(found)
    return fixed_plan(request, "checkpoint-sqrt", recompute_inside(layers, parts))
