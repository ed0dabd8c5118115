"""Activation checkpointing: only the inputs of segments are kept, and what a segment saved is recomputed from them.

Chen, Xu, Zhang, Guestrin, "Training Deep Nets with Sublinear Memory Cost", arXiv 1604.06174; in PyTorch as
``torch.utils.checkpoint``. ``checkpoint`` makes each repeated block of the network a segment, which is what libraries
of models do. ``checkpoint-sqrt`` joins n of them to the square root of n segments, which the paper shows to need
memory in the order of the square root of the depth at the cost of one more forward. Under a budget the former
checkpoints as many blocks, from the first on, as is fastest within it, and the latter does so for every number of
blocks that a segment may have; a budget that holds the plain step checkpoints nothing.

Departures. Nothing is wrapped, so no module needs to be edited: a segment is a set of ops, found by the names of
modules that repeat (:mod:`~.segments`), and in a network without blocks forward is cut into as many parts of equal
numbers of layers as the square root of their number (``checkpoint-sqrt`` tries other numbers too), where the fewest
bytes cross. A checkpoint is a
saved storage: where a segment's input is not saved by anybody, the saved storages that it is made of are kept in its
place. A replay runs only the ops that lead to what is asked for, and memoises what the segment saved on the way,
so no op is run twice, and none whose result nobody needs. What is outside of all segments or cannot be replayed is
kept.
"""

from __future__ import annotations

import math

import numpy as np

from lightning_offload.graph.memory_plan import MemoryPlan
from lightning_offload.planning.policies.fitting import Fitting, Tried, num_tried, spaced
from lightning_offload.planning.policies.layers import layers_of
from lightning_offload.planning.policies.segments import (
    OUTSIDE,
    Replays,
    by_block,
    crossing_bytes_of,
    equal_parts,
    grouped,
    num_layers,
    sqrt_size,
)
from lightning_offload.planning.request import PlanRequest


def checkpoint(request: PlanRequest) -> MemoryPlan:
    """Recompute each block from its inputs."""
    layers, fitting = layers_of(request.problem), Fitting(request, "checkpoint")
    _first_segments(fitting, Replays(layers), by_block(request.problem) or equal_parts(layers))
    return fitting.plan()


def checkpoint_sqrt(request: PlanRequest) -> MemoryPlan:
    """Recompute as many segments as the square root of the number of blocks, or of layers."""
    layers, fitting = layers_of(request.problem), Fitting(request, "checkpoint-sqrt")
    found, is_fixed = by_block(request.problem), request.budget_bytes is None
    if found is not None:
        most = max(found) + 1
        sizes = [sqrt_size(most)] if is_fixed else spaced(1, most, num_tried(request))
        splits = [grouped(found, size) for size in sizes]
    else:
        root = round(math.sqrt(num_layers(layers)))
        numbers = [root] if is_fixed else spaced(1, max(1, 2 * root), num_tried(request))
        crossing_bytes = crossing_bytes_of(request.problem)
        splits = [equal_parts(layers, number, crossing_bytes) for number in numbers]
    replays = Replays(layers)
    for split in splits:
        _first_segments(fitting, replays, split)
    return fitting.plan()


def _first_segments(fitting: Fitting, replays: Replays, segment_of_op: list[int]) -> None:
    """Allow recomputing the first segments, however many; all of them where there is no budget."""
    segments = np.array(segment_of_op, dtype=np.int64)

    def first(num: int) -> Tried:
        return Tried(actions=replays.inside(np.where(segments < num, segments, OUTSIDE)))

    fitting.up_to(max(segment_of_op, default=OUTSIDE) + 1, first)
