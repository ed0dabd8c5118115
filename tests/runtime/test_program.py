"""A plan becomes tables: what to record, follow, release and prefetch, by op and by unpack."""

from __future__ import annotations

import pytest

from lightning_offload.errors import PlanError
from lightning_offload.graph import Decision, StepGraph
from lightning_offload.runtime.program import BUSY, RECORD, compile_plan
from tests.graph.building import GraphBuilder, chain
from tests.runtime.executing import plan_of

FOUR = chain(10, 20, 30, 40)
"""Ops 0 to 3 make storages 1 to 4; ops 4 to 7 are those of backward."""


def _five_in_backward() -> StepGraph:
    builder = GraphBuilder()
    value = builder.given(10)
    saves = []
    for size in (10, 20, 30, 40):
        value = builder.make(size, value)
        saves.append(builder.pack(value))
    builder.backward()
    for save in reversed(saves):
        builder.unpack(save)
        builder.make(8)
        if save == saves[-1]:
            builder.make(8)
    return builder.build()


FIVE = _five_in_backward()
"""The same, but for a second op, op 5, after the first unpack."""


def recorded(graph: StepGraph, *decisions: Decision) -> list[int]:
    """Which ops a plan has recorded."""
    return [i for i, flags in enumerate(compile_plan(graph, plan_of(graph, *decisions)).op_flags) if flags & RECORD]


def test_keeping_everything_asks_for_nothing() -> None:
    """A plan without decisions, or with keep alone, needs no ops at all."""
    for decisions in ((), (Decision(storage=1, action="keep"),)):
        program = compile_plan(FOUR, plan_of(FOUR, *decisions))
        assert (program.is_keep_all, program.is_recomputing, program.is_strict) == (True, False, False)
        assert (program.decisions, program.prefetch) == ({}, {})
        assert (program.op_bytes, program.op_register, program.op_release) == ({}, {}, {})
        assert not any(program.op_flags)
        assert len(program.op_flags) == len(program.op_names) == 4
    assert program.pack_bytes == (10, 20, 30, 40)


def test_ops_of_backward_are_left_out_where_nothing_is_asked_of_them() -> None:
    """Backward may run other ops when gradients accumulate, so its ops are compared only where needed."""
    program = compile_plan(FOUR, plan_of(FOUR, Decision(storage=1, action="swap")))
    assert [len(program.op_names), program.is_strict] == [4, False]
    at_an_unpack = compile_plan(FOUR, plan_of(FOUR, Decision(storage=1, action="swap", release_op=5)))
    assert [len(at_an_unpack.op_names), at_an_unpack.is_strict] == [4, False]
    assert at_an_unpack.release_at_unpack == {1: (1,)}
    strict = compile_plan(FIVE, plan_of(FIVE, Decision(storage=1, action="swap", release_op=5)))
    assert [len(strict.op_names), strict.is_strict] == [9, True]
    assert strict.op_release == {5: (1,)}


def test_backward_is_not_seen_for_a_release_while_something_is_recomputed() -> None:
    """Forward's ops are, then; a release of backward comes at its unpack, as it does where no op is seen."""
    decisions = Decision(storage=1, action="swap", release_op=5), Decision(storage=3, action="recompute")
    program = compile_plan(FOUR, plan_of(FOUR, *decisions))
    assert (program.needs_ops, program.is_strict, len(program.op_names)) == (True, False, 4)
    assert (program.release_at_unpack, 1 in program.busy_unpacks) == ({1: (1,)}, True)


def test_swapped_storage_is_followed_and_scheduled() -> None:
    """Its maker registers it, an op releases it, an unpack brings it back."""
    program = compile_plan(FOUR, plan_of(FOUR, Decision(storage=2, action="swap", release_op=3, prefetch_unpack=1)))
    assert program.op_register == {1: ((0, 2),)}
    assert program.op_release == {3: (2,)}
    assert program.prefetch == {1: (2,)}
    assert recorded(FOUR, Decision(storage=2, action="swap")) == []
    assert program.op_bytes == {1: (20,), 3: (40,)}
    assert list(program.op_flags) == [0, BUSY, 0, BUSY]


def test_recomputed_storage_records_its_producer_down_to_what_is_at_hand() -> None:
    """A kept, swapped or persistent input ends the chain; recomputed ones go on."""
    assert recorded(FOUR, Decision(storage=3, action="recompute")) == [2]
    assert recorded(FOUR, Decision(storage=3, action="recompute"), Decision(storage=2, action="swap")) == [2]
    assert recorded(FOUR, *(Decision(storage=s, action="recompute") for s in (2, 3))) == [1, 2]
    assert recorded(FOUR, Decision(storage=1, action="recompute")) == [0]


def test_unsaved_inputs_are_recorded_too() -> None:
    """Temporaries between saved values have nobody else to keep them."""
    b = GraphBuilder()
    temporary = b.make(10, b.given(1))
    second = b.make(10, temporary)
    value = b.make(10, second)
    b.pack(value)
    assert recorded(b.build(), Decision(storage=3, action="recompute")) == [0, 1, 2]


def test_in_place_chain_is_recorded_in_full() -> None:
    """Each write to the storage is part of what makes its last value."""
    b = GraphBuilder()
    value = b.make(10, b.given(1))
    for _ in range(2):
        (value,) = b.op((value,), writes=(value,))
    b.pack(value)
    assert recorded(b.build(), Decision(storage=1, action="recompute")) == [0, 1, 2]


def test_recomputing_the_irreproducible_is_a_plan_error() -> None:
    """A result of an op that cannot be replayed, or of none, is refused by name."""
    b = GraphBuilder()
    given = b.given(1)
    (opaque,) = b.op((given,), (10,), name="aten.empty.memory_format", replayable=False)
    result = b.make(10, opaque)
    b.pack(result)
    graph = b.build()
    with pytest.raises(PlanError, match=r"aten\.empty\.memory_format"):
        compile_plan(graph, plan_of(graph, Decision(storage=2, action="recompute")))
    b = GraphBuilder()
    b.pack(b.given(10))
    graph = b.build()
    with pytest.raises(PlanError, match="nothing"):
        compile_plan(graph, plan_of(graph, Decision(storage=0, action="recompute")))


def test_plan_of_another_graph_is_refused() -> None:
    """A plan is checked against its graph before anything is compiled."""
    with pytest.raises(PlanError, match="another model"):
        compile_plan(FOUR, plan_of(chain(10, 20, 30)))
