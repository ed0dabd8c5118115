"""Where in a step autograd calls saved-tensor hooks: the points that a runtime comes by without seeing ops."""

from __future__ import annotations

from typing import NamedTuple

from lightning_offload.graph.step_graph import StepGraph


class HookPoint(NamedTuple):
    """A pack or an unpack.

    Attributes:
        is_pack: Whether it is a pack.
        ordinal: Of the packs of the step, or of its unpacks.
    """

    is_pack: bool
    ordinal: int


def hooks_before_ops(graph: StepGraph) -> tuple[HookPoint | None, ...]:
    """By op: the first hook between the op before it and itself; None where there is none."""
    packs = [(save.pack_tick, HookPoint(True, i)) for i, save in enumerate(graph.saves)]
    unpack_ticks = sorted(tick for save in graph.saves for tick in save.unpack_ticks)
    points = sorted(packs + [(tick, HookPoint(False, i)) for i, tick in enumerate(unpack_ticks)])
    found: list[HookPoint | None] = []
    place = 0
    for op in graph.ops:
        first: HookPoint | None = None
        while place < len(points) and points[place][0] < op.tick:
            first = first or points[place][1]
            place += 1
        found.append(first)
    return tuple(found)
