"""Steps at several batch sizes are told apart by their structure."""

from __future__ import annotations

import dataclasses

import pytest

from lightning_offload.graph import StepGraph
from lightning_offload.tuning.step_model import difference, same_structure
from tests.graph.building import chain

SMALL, LARGE, LONGER = chain(10, 20), chain(100, 200), chain(10, 20, 30)


def test_sizes_and_times_are_no_structure() -> None:
    """Steps that differ in bytes and seconds alone are the same."""
    assert same_structure({4: LARGE, 2: SMALL}) == (2, 4)
    assert difference(SMALL, LARGE) is None


def test_the_largest_group_is_taken() -> None:
    """At size 1 the step is another one; the others are taken, in order."""
    assert same_structure({1: LONGER, 8: LARGE, 2: SMALL, 4: LARGE}) == (2, 4, 8)


def test_of_equal_groups_that_of_the_larger_sizes_is_taken() -> None:
    """Two and two: the larger ones are closer to what will be predicted."""
    assert same_structure({1: LONGER, 2: LONGER, 4: SMALL, 8: LARGE}) == (4, 8)
    assert same_structure({2: LONGER, 4: SMALL}) == (4,)


def _with_save(graph: StepGraph) -> StepGraph:
    save = dataclasses.replace(graph.saves[0], unpack_ticks=())
    return dataclasses.replace(graph, saves=(save, *graph.saves[1:]))


def _with_op(graph: StepGraph) -> StepGraph:
    op = dataclasses.replace(graph.ops[1], name="aten.clone.default", module="rnn")
    return dataclasses.replace(graph, ops=(graph.ops[0], op, *graph.ops[2:]))


def _with_birth(graph: StepGraph) -> StepGraph:
    storage = dataclasses.replace(graph.storages[1], birth=-1)
    return dataclasses.replace(graph, storages=(graph.storages[0], storage, *graph.storages[2:]))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_with_op, "op 1 is aten.op.default at one and op 1 is aten.clone.default in `rnn` at the other"),
        (_with_save, "save 0 is of value 1 at tick 1, read 1 times at one and"),
        (_with_birth, "storage 1 is made at tick 0 at one and storage 1 is made at tick -1"),
        (lambda g: dataclasses.replace(g, num_ticks=g.num_ticks + 1), "ticks"),
        (lambda g: dataclasses.replace(g, saves=()), "save 0"),
    ],
    ids=["op", "save", "birth", "ticks", "fewer saves"],
)
def test_the_first_difference_is_named(change: object, words: str) -> None:
    """What differs is said in words of the model."""
    assert callable(change)
    text = difference(SMALL, change(SMALL))
    assert text is not None
    assert words in text
