"""Where in a step autograd calls saved-tensor hooks: the points that a runtime comes by without seeing ops."""

from __future__ import annotations

from typing import NamedTuple

from lightning_offload.graph.step_graph import StepGraph, by_structure


class HookPoint(NamedTuple):
    """A pack or an unpack.

    Attributes:
        is_pack: Whether it is a pack.
        ordinal: Of the packs of the step, or of its unpacks.
    """

    is_pack: bool
    ordinal: int


@by_structure
def hooks_before_ops(graph: StepGraph) -> tuple[HookPoint | None, ...]:
    """By op: the last hook between the op before it and itself; None where there is none.

    What comes after it is after every pack that comes before the op.
    """
    packs = [(save.pack_tick, HookPoint(True, i)) for i, save in enumerate(graph.saves)]
    unpack_ticks = sorted(tick for save in graph.saves for tick in save.unpack_ticks)
    points = sorted(packs + [(tick, HookPoint(False, i)) for i, tick in enumerate(unpack_ticks)])
    found: list[HookPoint | None] = []
    place = 0
    for op in graph.ops:
        last: HookPoint | None = None
        while place < len(points) and points[place][0] < op.tick:
            last = points[place][1]
            place += 1
        found.append(last)
    return tuple(found)
