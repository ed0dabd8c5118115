"""Whether recorded steps of one model are the same but for their sizes and times.

Kernels, views and copies may depend on the batch size: at 1 a copy is often left out, and the step has fewer ops. Two
steps have the same structure if the same ops read and make the same values at the same ticks and autograd saved and
read back the same of them. When a storage dies may differ, where Python's garbage collector lets go of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator, Mapping

from lightning_offload.graph.step_graph import StepGraph

Row = tuple[str, Hashable]
"""What a row of a graph is called, and what must be the same."""


def same_structure(graphs: Mapping[int, StepGraph]) -> tuple[int, ...]:
    """The batch sizes of most graphs that have the same structure, ascending.

    Args:
        graphs: By batch size.

    Returns:
        Of groups of the same length, the one of the larger sizes; a single size where no two agree.
    """
    groups: dict[Hashable, list[int]] = {}
    for size in sorted(graphs):
        groups.setdefault(tuple(_rows(graphs[size])), []).append(size)
    largest = max(map(len, groups.values()))
    return tuple(max(group for group in groups.values() if len(group) == largest))


def difference(first: StepGraph, second: StepGraph) -> str | None:
    """Where the structures of two graphs part, for a message; None where they are the same."""
    rows = itertools.zip_longest(_rows(first), _rows(second), fillvalue=("the step is over", None))
    for mine, others in rows:
        if mine != others:
            return f"{mine[0]} at one and {others[0]} at the other"
    return None


def _rows(graph: StepGraph) -> Iterator[Row]:
    """What makes the structure; ops first, since what they do differently explains the rest."""
    for i, op in enumerate(graph.ops):
        where = f" in `{op.module}`" if op.module else ""
        yield f"op {i} is {op.name}{where}", (op.name, op.phase, op.tick, op.inputs, op.outputs)
    for i, save in enumerate(graph.saves):
        title = f"save {i} is of value {save.value} at tick {save.pack_tick}, read {len(save.unpack_ticks)} times"
        yield title, (save.value, save.pack_tick, save.unpack_ticks)
    for i, value in enumerate(graph.values):
        yield f"value {i} is made by op {value.producer} on storage {value.storage}", (value.storage, value.producer)
    for i, storage in enumerate(graph.storages):
        yield f"storage {i} is made at tick {storage.birth}", storage.birth
    yield f"the step takes {graph.num_ticks} ticks", graph.num_ticks
