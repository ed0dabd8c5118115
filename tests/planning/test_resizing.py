"""A recorded step at other sizes."""

from __future__ import annotations

import pytest

from lightning_offload.graph.step_graph import StepGraph
from lightning_offload.planning.resizing import InputShapes, Shapes, resized, varying_share
from tests.graph.building import GraphBuilder

WIDTH, WEIGHT_BYTES = 7, 196


def _step(length: int) -> tuple[StepGraph, Shapes]:
    """Saves a row for each position, a matrix of all pairs of them, and what has nothing to do with them."""
    b = GraphBuilder()
    weight, batch = b.given(WEIGHT_BYTES), b.given(8 * length)
    rows = b.make(WIDTH * length, weight, batch)
    pairs = b.make(length * length, rows)
    fixed = b.make(55, weight)
    saves = [b.pack(value) for value in (rows, pairs, fixed)]
    b.make(WIDTH * length + 1, rows)  # nobody saves it
    b.backward()
    for save in reversed(saves):
        b.unpack(save)
        b.make(WEIGHT_BYTES, rows, pairs)  # a gradient
        b.release(save)
    return b.build(), ((length, WIDTH), (length, length), (55,))


def _given(*lengths: int) -> InputShapes:
    given = InputShapes()
    for length in lengths:
        given.learn(((4, length), (3,)), _step(length)[1])
    return given


def test_sizes_are_parts_of_the_most() -> None:
    """Of the tensors that vary alone; more than that is more than one."""
    given = _given(10, 40, 20)
    assert given.vary
    assert given.size_of(((4, 40), (3,))) == 1
    assert given.size_of(((4, 10), (3,))) == 0.25
    assert given.size_of(((4, 50), (3,))) == 1.25
    assert given.size_of(((4, 10),)) == 1  # of other inputs nothing is known


def test_where_nothing_varies_all_are_as_large() -> None:
    """As in kinds of step of one shape."""
    given = _given(10, 10)
    assert not given.vary
    assert given.size_of(((4, 10), (3,))) == 1
    assert given.varying_in(((4, 10), (3,)), _step(10)[1]) == frozenset()


def test_what_varies_is_what_not_all_steps_save() -> None:
    """And what they are given, even where it is as large as something else."""
    assert _given(10, 40).varying_in(((4, 40), (3,)), _step(40)[1]) == {40}
    assert WIDTH in _given(10, WIDTH).varying_in(((4, WIDTH), (3,)), _step(WIDTH)[1])


@pytest.mark.parametrize("length", [10, 20, 39, 41, 80])
def test_no_tensor_is_smaller_than_it_would_be(length: int) -> None:
    """Rows grow with the length, pairs with its square, gradients and the rest not at all."""
    graph, saved = _step(40)
    made, actual = resized(graph, saved, {40}, length / 40), _step(length)[0]
    for storage, (mine, true) in enumerate(zip(made.storages, actual.storages, strict=True)):
        if storage > 1:  # what was there before is what was there
            assert mine.num_bytes >= true.num_bytes
            assert mine.num_bytes <= true.num_bytes * max(1, 40 / length) + 1
    assert made.storages[:2] == graph.storages[:2]
    assert [s.num_bytes for s in made.storages if s.num_bytes in (55, WEIGHT_BYTES)] == [WEIGHT_BYTES, 55] + 3 * [
        WEIGHT_BYTES
    ]


def test_what_varies_together_counts_once() -> None:
    """Twice the batch and twice the length are four times the elements: rows of both grow as these do."""
    graph, _ = _step(40)
    saved = ((40, 40), (40, 40), (55,))
    made = resized(graph, saved, {40}, 4.0, num_together=2)
    assert made.storages[2].num_bytes == 4 * graph.storages[2].num_bytes


def test_time_goes_with_size() -> None:
    """Of ops that have to do with what varies."""
    graph, saved = _step(40)
    made = resized(graph, saved, {40}, 0.5)
    seconds = [op.seconds / before.seconds for op, before in zip(made.ops, graph.ops, strict=True)]
    assert seconds == [0.5, 0.5, 1, 0.5, 0.5, 0.5, 0.5]


def test_the_share_that_varies() -> None:
    """By what is saved of what the step made."""
    graph, saved = _step(40)
    varying = WIDTH * 40 + 1600
    assert varying_share(graph, saved, {40}) == varying / (varying + 55)
