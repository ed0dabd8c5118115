"""Gradients of a recorded step, and the buckets in which DistributedDataParallel exchanges them.

A gradient is ready when the last op of backward that touches it has run: one that makes it, adds the last part to it,
or hands it to its parameter. DDP makes its buckets anew after the first step, in the order in which gradients became
ready then: a bucket is closed by the gradient that fills it, the first one at 1 MiB so that the exchange starts early,
all others at ``bucket_cap_mb``, 25 MiB by default.

Shortfalls: all gradients count as of one type (DDP has buckets for each); parameters that get no gradient, which DDP
exchanges all the same under ``find_unused_parameters``, are left out, since a step does not show them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from lightning_offload.graph.step_graph import StepGraph

BUCKET_BYTES = 25 << 20
"""DDP's ``bucket_cap_mb`` by default."""
FIRST_BUCKET_BYTES = 1 << 20
"""What fills DDP's first bucket by default."""

_COLLECTS = ("aten.add_.", "aten._foreach_add_.", "aten.copy_.", "aten.mul.out", "aten.div.out")
"""Ops by which backward adds to the gradients of an earlier step, or fills DDP's buckets."""
_SUMS = (*_COLLECTS, "aten.add.Tensor")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Gradient:
    """A gradient that backward leaves behind.

    Attributes:
        num_bytes: Its size.
        ready_op: The op that finishes it; -1 where backward was not observed.
    """

    num_bytes: int
    ready_op: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Gradients that are exchanged together.

    Attributes:
        num_bytes: Their size.
        ready_seconds: When the last of them is ready, from the beginning of the step.
    """

    num_bytes: int
    ready_seconds: float


def gradients_of(graph: StepGraph) -> tuple[Gradient, ...]:
    """The gradients of a step in the order in which they become ready.

    They are the storages that backward makes and that outlive the step, and what it puts into those from before the
    step: into gradients that are accumulated, or into DDP's buckets where the step was recorded under it.
    """
    begin = next((op.tick for op in graph.ops if op.phase == "backward"), graph.num_ticks)
    touched: dict[int, int] = {}
    filled: dict[int, int] = {}
    parts: set[int] = set()
    for index, op in enumerate(graph.ops):
        if op.phase != "backward":
            continue
        read, written = (_storages(graph, values) for values in (op.inputs, op.outputs))
        made = {s for s in read - written if graph.storages[s].birth >= begin}
        new = {s for s in written if graph.storages[s].birth >= begin and graph.storages[s].death == graph.num_ticks}
        old = {s for s in written if graph.storages[s].is_persistent}
        touched.update(dict.fromkeys(made & touched.keys() | new, index))
        if made and old and op.name.startswith(_COLLECTS):
            gradient = _filled(graph, made, old)
            filled[gradient] = index
            parts |= made - {gradient}
        elif made and new and op.name.startswith(_SUMS):
            parts |= made
    ready = {s: index for s, index in (touched | filled).items() if s not in parts}
    gradients = [Gradient(num_bytes=graph.storages[s].num_bytes, ready_op=index) for s, index in ready.items()]
    if graph.gradient_bytes:
        gradients.append(Gradient(num_bytes=graph.gradient_bytes, ready_op=-1))
    gradients = [gradient for gradient in gradients if gradient.num_bytes]
    return tuple(sorted(gradients, key=lambda gradient: (gradient.ready_op < 0, gradient.ready_op)))


def _storages(graph: StepGraph, values: tuple[int, ...]) -> set[int]:
    return {graph.values[value].storage for value in values}


def _filled(graph: StepGraph, made: set[int], old: set[int]) -> int:
    """The storage that stands for a gradient: the old one, unless that is larger, a bucket then."""
    source, target = (max(found, key=lambda s: graph.storages[s].num_bytes) for found in (made, old))
    return target if graph.storages[source].num_bytes == graph.storages[target].num_bytes else source


def make_buckets(
    gradients: Sequence[tuple[int, float]], *, cap_bytes: int = BUCKET_BYTES, first_bytes: int = FIRST_BUCKET_BYTES
) -> tuple[Bucket, ...]:
    """Gather gradients in buckets.

    Args:
        gradients: Bytes and ready time of each, in the order in which they become ready.
        cap_bytes: What fills a bucket; it may be overshot by its last gradient.
        first_bytes: What fills the first one.
    """
    buckets: list[Bucket] = []
    filled, ready = 0, 0.0
    for num_bytes, ready_seconds in gradients:
        filled, ready = filled + num_bytes, max(ready, ready_seconds)
        if filled >= (cap_bytes if buckets else first_bytes):
            buckets.append(Bucket(num_bytes=filled, ready_seconds=ready))
            filled = 0
    if filled:
        buckets.append(Bucket(num_bytes=filled, ready_seconds=ready))
    return tuple(buckets)
