"""The packs and unpacks that come before ops."""

from __future__ import annotations

import pytest
from hypothesis import given

from lightning_offload.graph import StepGraph
from lightning_offload.graph.hook_points import HookPoint, hooks_before_ops
from tests.graph.building import GraphBuilder, chain, step_graphs


def test_chain() -> None:
    """Each op of a chain but the first comes after a pack, or after an unpack in backward."""
    packs = [HookPoint(True, i) for i in range(2)]
    unpacks = [HookPoint(False, i) for i in range(3)]
    assert hooks_before_ops(chain(10, 20, 30)) == (None, *packs, *unpacks)


@pytest.mark.parametrize("num_packs", [0, 1, 3])
def test_last_of_several(num_packs: int) -> None:
    """Of the hooks between two ops it is the last."""
    b = GraphBuilder()
    value = b.make(10, b.given(1))
    for _ in range(num_packs):
        b.pack(value)
    b.op((value,))
    b.op((value,))
    last = HookPoint(True, num_packs - 1) if num_packs else None
    assert hooks_before_ops(b.build()) == (None, last, None)


@given(step_graphs())
def test_hooks_lie_between_their_op_and_the_one_before(graph: StepGraph) -> None:
    """Ordinals are those that a runtime counts, and no hook is given to two ops."""
    pack_ticks = [save.pack_tick for save in graph.saves]
    unpack_ticks = sorted(tick for save in graph.saves for tick in save.unpack_ticks)
    found = hooks_before_ops(graph)
    assert len(found) == len(graph.ops)
    previous = -1
    for op, hook in zip(graph.ops, found, strict=True):
        between = [tick for tick in (*pack_ticks, *unpack_ticks) if previous < tick < op.tick]
        if hook is None:
            assert not between
        else:
            assert max(between) == (pack_ticks if hook.is_pack else unpack_ticks)[hook.ordinal]
        previous = op.tick
