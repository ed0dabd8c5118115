"""What one node of autograd reads back all at once: what a compiled region saved, or a custom Function.

Nothing of that can be elsewhere while the node runs, in forward until it has saved all, so a region that is the whole
model has a floor near the plain peak. Smaller regions have lower ones.

Shortfall: nodes without an op between their reads are taken for one.
"""

from __future__ import annotations

import dataclasses
import itertools

from lightning_offload.graph.step_graph import Save, StepGraph

_MUCH = 0.5  # of what is saved


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """A node of autograd that reads half of what a step saves, or more.

    Attributes:
        module: Where what it reads was saved; "" where that is not known.
        num_bytes: What it reads, of storages that the step made.
        saved_bytes: What the step saves, of such.
    """

    module: str
    num_bytes: int
    saved_bytes: int

    @property
    def advice(self) -> str:
        """What to do about it, for a person."""
        where = f" of `{self.module}`" if self.module else ""
        return (
            f"{round(100 * self.num_bytes / self.saved_bytes)}% of what is saved is read back at once{where}, as by "
            "one compiled region or one checkpoint around all: compile its blocks and not the whole (`for block in "
            "model.blocks: block.compile()`, use_regional_compilation in Accelerate), or checkpoint each block"
        )


def largest_region(graph: StepGraph) -> Region | None:
    """The node that reads half of what a step saves, or more; None where there is none."""
    made = [save for save in graph.saves if not graph.storages[graph.values[save.value].storage].is_persistent]
    saved_bytes = _num_bytes(graph, made)
    if not saved_bytes:
        return None
    ops = [(op.tick, None) for op in graph.ops]
    reads = [(at, save) for save in made for at in save.unpack_ticks]
    events = sorted([*ops, *reads], key=lambda event: event[0])
    for is_read, group in itertools.groupby(events, key=lambda event: event[1] is not None):
        saves = [save for _, save in group if save is not None]
        if is_read and len(saves) > 1 and _num_bytes(graph, saves) >= _MUCH * saved_bytes:
            return Region(module=saves[0].module, num_bytes=_num_bytes(graph, saves), saved_bytes=saved_bytes)
    return None


def _num_bytes(graph: StepGraph, saves: list[Save]) -> int:
    return sum(graph.storages[s].num_bytes for s in {graph.values[save.value].storage for save in saves})
