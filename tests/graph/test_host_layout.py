"""How long copies of swapped storages lie on their tier."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lightning_offload.graph import StepGraph
from lightning_offload.graph.host_layout import ALIGNMENT, LiveRanges, stored_bytes
from lightning_offload.planning.problem import Problem
from lightning_offload.planning.simulator import residency
from tests.graph.building import GraphBuilder, chain, step_graphs

FOUR = chain(10, 20, 30, 40)
"""Storages 1 to 4, packed at ticks 1, 3, 5, 7, unpacked at 14, 12, 10, 8 and dropped two ticks later."""


def test_stays_from_the_first_pack_until_autograd_drops_it() -> None:
    """Where nothing is recomputed."""
    stays = LiveRanges(FOUR)
    assert stays.begin == {1: 1, 2: 3, 3: 5, 4: 7}
    assert stays.ends(()) == {1: 16, 2: 14, 3: 12, 4: 10}


def test_two_saves_of_a_storage_are_one_stay() -> None:
    """It begins with the first and ends with the last of them."""
    b = GraphBuilder()
    value = b.make(10, b.given(1))
    first = b.pack(value)  # tick 1
    second = b.pack(value)
    b.drop(value)
    for save in (first, second):
        b.unpack(save)
        b.release(save)
    stays = LiveRanges(b.build())
    assert (stays.begin, stays.ends(())) == ({1: 1}, {1: 5})


def _early_input(*, saved_between: bool) -> StepGraph:
    """A saved result that is dropped before another one that is made from it, through one in between."""
    b = GraphBuilder()
    first = b.make(10, b.given(1))
    saves = [b.pack(first)]
    between = b.make(20, first)
    if saved_between:
        saves.append(b.pack(between))
    last = b.make(30, between)
    late = b.pack(last)
    b.drop(first, between, last)
    b.backward()
    for save in (*saves, late):
        b.unpack(save)
        b.release(save)
    return b.build()


def test_a_replay_may_read_until_its_result_is_dropped() -> None:
    """What a recomputed storage is made from, through a result that is not saved, stays as long as that storage."""
    stays = LiveRanges(_early_input(saved_between=False))
    assert stays.ends(()) == {1: 6, 3: 7}
    assert stays.ends({3}) == {1: 7, 3: 7}


def test_chains_of_recomputed_storages_extend_stays() -> None:
    """A storage that is read only through another recomputed one stays too; through one at hand it does not."""
    stays = LiveRanges(_early_input(saved_between=True))
    assert stays.ends(()) == {1: 7, 2: 8, 3: 9}
    assert stays.ends({3}) == {1: 7, 2: 9, 3: 9}
    assert stays.ends({2, 3}) == {1: 9, 2: 9, 3: 9}


def test_overwritten_saves_are_not_read_by_replays() -> None:
    """A storage written after it was saved holds something else, so that a replay goes on behind it."""
    b = GraphBuilder()
    first = b.make(10, b.given(1))
    save_first = b.pack(first)
    second = b.make(20, first)
    save_second = b.pack(second)
    b.op((first,), writes=(first,))
    b.drop(first, second)
    b.unpack(save_first)
    b.release(save_first)
    b.unpack(save_second)
    b.release(save_second)
    assert LiveRanges(b.build()).ends({2}) == {1: 6, 2: 7}


def test_what_is_written_once_backward_has_read_a_save_matters_to_no_replay() -> None:
    """A gradient that is made in the memory of what was saved: until then replays make what was saved."""
    b = GraphBuilder()
    first = b.make(10, b.given(1))
    second = b.make(20, first)
    saves = [b.pack(first), b.pack(second)]
    b.drop(first)
    b.backward()
    b.unpack(saves[0])
    b.release(saves[0])
    b.unpack(saves[1])
    b.op((second,), writes=(second,))
    b.release(saves[1])
    b.drop(second)
    stays = LiveRanges(b.build())
    assert stays.ends(()) == {1: 5, 2: 7}
    assert stays.ends({2}) == {1: 7, 2: 7}


def test_bytes_are_rounded_up_to_the_alignment() -> None:
    """A storage takes whole pages."""
    assert [stored_bytes(n) for n in (0, 1, ALIGNMENT, ALIGNMENT + 1)] == [0, ALIGNMENT, ALIGNMENT, 2 * ALIGNMENT]


@given(graph=step_graphs(), data=st.data())
def test_stays_cover_every_read(graph: StepGraph, data: st.DataObject) -> None:
    """Whatever is recomputed, with or without memo: a swapped storage is on its tier whenever backward needs it."""
    problem = Problem(graph)
    actions = {
        s: data.draw(st.sampled_from(["swap"] + ["recompute"] * c.can_recompute)) for s, c in problem.candidates.items()
    }
    recomputed = frozenset(s for s, action in actions.items() if action == "recompute")
    ends = problem.stays.ends(recomputed)
    no_memo = recomputed if data.draw(st.booleans()) else frozenset()
    found = residency(problem, actions, no_memo)
    for s, action in actions.items():
        if action == "swap":
            assert problem.stays.begin[s] <= problem.candidates[s].pack_tick
            assert ends[s] >= problem.candidates[s].release
            if s in found.needed_at:
                assert found.needed_at[s] < ends[s]
                assert found.held_until[s] <= ends[s]
    assert all(ends[s] <= problem.stays.ends(problem.candidates)[s] for s in ends)
