"""A node of autograd that reads back most of what is saved at once is told of where it sets the floor."""

from __future__ import annotations

import pytest

from lightning_offload.errors import BudgetInfeasibleError
from lightning_offload.graph import StepGraph
from lightning_offload.planning.findings import explain_floor
from lightning_offload.planning.planner import plan
from lightning_offload.planning.regions import largest_region
from tests.graph.building import DEVICE, GraphBuilder

SIZE, NUM_LAYERS = 1 << 20, 6


def step(region: int) -> StepGraph:
    """Layers that save what they make; backward reads what so many of them saved at once, then has an op each."""
    b = GraphBuilder()
    weight = b.given(8)
    saved, last = [], weight
    for _ in range(NUM_LAYERS):
        last = b.make(SIZE, last)
        saved.append((b.pack(last), last))
    b.drop(*(value for _, value in saved))
    b.backward()
    for first in range(NUM_LAYERS - region, -1, -region):
        some = saved[first : first + region]
        for save, _ in reversed(some):
            b.unpack(save)
        for save, value in reversed(some):
            b.op((value, weight), (8,))
            b.release(save)
    return b.build()


def test_the_whole_model_is_a_region() -> None:
    """It is told of in findings and in the error, with how much it reads."""
    graph = step(NUM_LAYERS)
    region = largest_region(graph)
    assert region is not None
    assert region.num_bytes == region.saved_bytes == NUM_LAYERS * SIZE
    found = explain_floor(graph)
    (remedy,) = (each for each in found.remedies if each.kind == "smaller-regions")
    assert remedy.advice.startswith("100% of what is saved is read back at once")
    with pytest.raises(BudgetInfeasibleError, match=r"100% of what is saved is read back at once.*block\.compile\(\)"):
        plan(graph, DEVICE, found.floor_bytes - 1)


def test_blocks_are_none() -> None:
    """Nothing is said where each node reads a part of it."""
    for size in (1, 2):
        graph = step(size)
        assert largest_region(graph) is None
        assert all(each.kind != "smaller-regions" for each in explain_floor(graph).remedies)
        with pytest.raises(BudgetInfeasibleError) as caught:
            plan(graph, DEVICE, explain_floor(graph).floor_bytes - 1)
        assert "at once" not in str(caught.value)


def test_a_step_that_saves_no_bytes_has_none() -> None:
    """Whatever it reads back at once, its floor is told of as that of any other step."""
    b = GraphBuilder()
    weight = b.given(8)
    saves = [b.pack(b.make(0, weight)) for _ in range(2)]
    b.backward()
    for save in saves:
        b.unpack(save)
    b.release(*saves)
    graph = b.build()
    assert largest_region(graph) is None
    with pytest.raises(BudgetInfeasibleError):
        plan(graph, DEVICE, 1)
