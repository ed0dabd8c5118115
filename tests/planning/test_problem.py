"""Which saved storages there is a choice about, and the memory that no choice changes."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given

from lightning_offload.graph import StepGraph
from lightning_offload.graph.step_graph import Accumulation, MadeGradient, last_values
from lightning_offload.planning.problem import MIN_BYTES, Problem, min_bytes
from tests.graph.building import GraphBuilder, chain, step_graphs
from tests.planning.reference_backward import is_live


def test_saved_results_are_candidates() -> None:
    """Each saved result of an op is a candidate, with its lifetimes taken from the graph."""
    problem = Problem(chain(40, 50))
    first, second = problem.candidates.values()
    assert (first.storage, first.value, first.num_bytes, first.pack_tick) == (1, 1, 40, 1)
    assert (first.death, first.release) == (4, 8)
    assert (second.death, second.release) == (4, 6)
    assert first.can_swap
    assert first.can_recompute
    assert [unpack.storage for unpack in problem.unpacks] == [2, 1]


def test_saved_parameter_is_no_candidate() -> None:
    """What existed before the step stays where it is."""
    b = GraphBuilder()
    b.pack(b.given(40))
    assert not Problem(b.build()).candidates


def test_must_keep_is_no_candidate() -> None:
    """One save that must be kept keeps its storage, though another save of it need not be."""
    b = GraphBuilder()
    value = b.make(40)
    b.pack(value)
    b.pack(value, must_keep=True)
    assert not Problem(b.build()).candidates


def test_overwritten_save_is_no_candidate() -> None:
    """A storage that is written after it was saved holds two values, and stays."""
    b = GraphBuilder()
    value = b.make(40)
    b.pack(value)
    b.op((value,), writes=(value,))
    assert not Problem(b.build()).candidates


def test_last_value_of_an_in_place_chain_is_a_candidate() -> None:
    """What is saved after the last write to it may leave, and is replayed through the writes before."""
    b = GraphBuilder()
    x = b.given(40)
    value = b.make(40, x)
    (written,) = b.op((value,), writes=(value,))
    b.pack(written)
    problem = Problem(b.build())
    assert problem.candidates[1].value == written
    assert problem.candidates[1].can_recompute


def test_tensors_chosen_by_the_user_are_no_candidates() -> None:
    """What ``keep`` names stays."""
    assert set(Problem(chain(40, 50), keep=frozenset({1})).candidates) == {2}


def test_small_storages_are_no_candidates() -> None:
    """Below 64 KiB a storage is not worth a decision, in a step that saves much more."""
    graph = chain(MIN_BYTES - 1, MIN_BYTES, 1 << 30)
    assert min_bytes(graph) == MIN_BYTES
    assert set(Problem(graph).candidates) == {2, 3}


def test_small_steps_decide_about_small_storages() -> None:
    """In a step that saves little everything is worth a decision, but for empty storages."""
    graph = chain(0, 1, 2)
    assert min_bytes(graph) == 1
    assert set(Problem(graph).candidates) == {2, 3}


def _cast(*, trained: bool, name: str = "aten._to_copy.default") -> Problem:
    b = GraphBuilder()
    source = b.given(80) if trained else b.make(80)
    (cast,) = b.op((source,), (40,), name=name)
    b.pack(cast)
    return Problem(b.build())


def test_cast_of_a_parameter_is_cast_again() -> None:
    """It may be recomputed, never swapped; casts of activations and other results of parameters are as any."""
    (cast,) = _cast(trained=True).candidates.values()
    assert (cast.can_swap, cast.can_recompute) == (False, True)
    (activation,) = _cast(trained=False).candidates.values()
    assert activation.can_swap
    (other,) = _cast(trained=True, name="aten.mul.Tensor").candidates.values()
    assert other.can_swap


def test_replayable_needs_replayable_or_available_inputs() -> None:
    """A result is replayable if its op is and each input is given, saved, or replayable itself."""
    b = GraphBuilder()
    x = b.given(8)
    opaque = b.make(8, x, replayable=False)
    from_opaque = b.make(8, opaque)
    saved_opaque = b.make(8, x, replayable=False)
    b.pack(saved_opaque)
    from_saved = b.make(8, saved_opaque, x)
    overwritten = b.make(8, x, replayable=False)
    b.pack(overwritten)
    from_overwritten = b.make(8, overwritten)
    b.op((overwritten,), writes=(overwritten,))
    problem = Problem(b.build())
    assert not problem.can_replay(opaque)
    assert not problem.can_replay(from_opaque)
    assert problem.can_replay(from_saved)
    assert not problem.can_replay(from_overwritten)


def test_updated_buffer_is_not_given() -> None:
    """A buffer's contents before its update are gone, those after it are there."""
    b = GraphBuilder()
    buffer = b.given(8)
    (updated,) = b.op((buffer,), writes=(buffer,))
    problem = Problem(b.build())
    assert not problem.is_external(buffer)
    assert problem.is_external(updated)


def test_live_until_dropped_or_overwritten() -> None:
    """A value is at hand while the program holds its storage, and until that is written again."""
    b = GraphBuilder()
    value = b.make(8)
    b.op((value,), writes=(value,))
    written = len(b.values) - 1
    b.op()
    b.drop(value)
    b.op()
    problem = Problem(b.build())
    assert [is_live(problem, value, tick) for tick in range(4)] == [True, False, False, False]
    assert [is_live(problem, written, tick) for tick in range(4)] == [True, True, True, False]


def test_base_memory_by_hand() -> None:
    """Persistent bytes always count; results count while the program holds them; kept saves until released."""
    b = GraphBuilder()
    weight = b.given(100)
    first = b.make(10, weight)  # tick 0
    save = b.pack(first, must_keep=True)  # tick 1
    second = b.make(5, first)  # tick 2
    b.drop(first)
    other = b.pack(second)  # tick 3
    b.drop(second)
    b.backward()
    b.unpack(other)  # tick 4
    b.release(other)
    b.unpack(save)  # tick 5
    b.release(save)
    b.make(1)  # tick 6, outlives the step, whose last entry is what was there before
    graph = b.build()
    assert Problem(graph).base.tolist() == [110, 110, 115, 115, 110, 110, 101, 100]
    extra = dataclasses.replace(graph, extra_bytes=1000)
    assert (Problem(extra).base - Problem(graph).base).tolist() == [1000] * 8


def test_workspaces_count_at_the_tick_of_their_op() -> None:
    """No plan changes what an op needs while it runs."""
    graph = chain(40, 50)
    ops = tuple(dataclasses.replace(op, workspace_bytes=7 * op.tick) for op in graph.ops)
    added = Problem(dataclasses.replace(graph, ops=ops)).base - Problem(graph).base
    at = {op.tick: 7 * op.tick for op in graph.ops}
    assert added.tolist() == [at.get(tick, 0) for tick in range(graph.num_ticks + 1)]


def test_gradients_of_earlier_steps_go_at_the_first_unpack() -> None:
    """Old gradients count from the start; what is not accumulated goes, unseen new ones come, with backward."""
    graph = chain(40)
    first_unpack = graph.saves[0].unpack_ticks[0]
    more = dataclasses.replace(graph, gradient_bytes=7, old_gradient_bytes=30, accumulated_bytes=20)
    added = (Problem(more).base - Problem(graph).base).tolist()
    assert added == [30] * first_unpack + [30 + 7 - 10] * (graph.num_ticks + 1 - first_unpack)


def test_gradients_that_are_added_up_go_one_by_one() -> None:
    """Once one is made it is gone, or the old one; which of the old ones are there is not known."""
    b = GraphBuilder()
    saves, made = [b.pack(b.make(1000)) for _ in range(3)], list[int]()
    b.backward()
    for save, num_bytes in zip(reversed(saves), (30, 20, 50), strict=True):
        b.unpack(save)
        b.release(save)
        made.append(b.make(num_bytes))  # a gradient, which stays
    graph = b.build()
    storages = [graph.values[value].storage for value in made]
    ticks = [graph.storages[storage].birth + 1 for storage in storages]
    gradients = tuple(MadeGradient(storage=s, tick=tick) for s, tick in zip(storages, ticks, strict=True))
    graph = dataclasses.replace(graph, made_gradients=gradients)

    def added(old_bytes: int, added_to: int) -> list[int]:
        """Until each is made, and from then on."""
        more = dataclasses.replace(
            graph,
            old_gradient_bytes=old_bytes,
            accumulated_bytes=old_bytes,
            accumulations=(Accumulation(idle_bytes=old_bytes - added_to, added_to_bytes=added_to),),
        )
        difference = (Problem(more).base - Problem(graph).base).tolist()
        sections = [set(difference[begin:end]) for begin, end in itertools.pairwise((0, *ticks, graph.num_ticks + 1))]
        assert all(len(section) == 1 for section in sections)
        return [section.pop() for section in sections]

    assert added(100, 100) == [100, 70, 50, 0]
    assert added(107, 100) == [107, 77, 57, 7]
    assert added(50, 50) == [50, 50, 50, 0]  # whichever they are
    assert added(80, 0) == [80, 80, 80, 80]


@pytest.mark.parametrize("reads_again", [True, False])
def test_written_after_the_last_read(reads_again: bool) -> None:
    """What backward writes after it has read it back for the last time may leave; before, it stays."""
    b = GraphBuilder()
    made = b.make(1 << 20, b.given(8))
    save, other = b.pack(made), b.pack(made)
    b.drop(made)
    b.backward()
    b.unpack(save)
    (gradient,) = b.op((made,), writes=(made,))
    if reads_again:
        b.unpack(other)
    b.op((gradient,), (8,))
    b.release(save, other)
    problem = Problem(b.build())
    assert list(problem.candidates) == ([] if reads_again else [1])
    assert problem.is_saved_for_good(made) is not reads_again


@given(step_graphs())
def test_candidates_are_saved_last_values_made_in_the_step(graph: StepGraph) -> None:
    """Whatever the step: a candidate is saved, may be kept away, and its value is the last on its storage."""
    problem, last = Problem(graph), last_values(graph)
    for storage, candidate in problem.candidates.items():
        saves = [save for save in graph.saves if graph.values[save.value].storage == storage]
        assert {save.value for save in saves} == {candidate.value} == {last[storage]}
        assert not any(save.must_keep for save in saves)
        assert graph.storages[storage].birth >= 0
        assert candidate.release == max(save.release_tick for save in saves)
    assert (problem.base >= graph.persistent_bytes).all()
    assert len(problem.base) == graph.num_ticks + 1
