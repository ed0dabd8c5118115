"""When swapped and recomputed storages are on the device, and what is replayed for them."""

from __future__ import annotations

from lightning_offload.graph import StepGraph
from lightning_offload.planning.problem import Problem
from lightning_offload.planning.simulator import residency, simulate
from tests.graph.building import DEVICE, GraphBuilder, chain

FOUR = chain(10, 20, 30, 40, seconds=1.0)
"""Storages 1 to 4, unpacked at ticks 8, 10, 12, 14 in the order 4, 3, 2, 1, each released a tick later."""


def test_kept_storages_need_nothing() -> None:
    """Without actions nothing is moved and nothing is replayed."""
    found = residency(Problem(FOUR), {})
    assert (found.needed_at, found.replay_seconds, found.num_replayed) == ({}, {}, 0)
    assert found.held_until == {4: 10, 3: 12, 2: 14, 1: 16}


def test_swapped_storage_is_needed_at_its_unpack() -> None:
    """It is back from its first unpack until autograd drops it."""
    found = residency(Problem(FOUR), {2: "swap"})
    assert found.needed_at == {2: 12}
    assert found.held_until[2] == 14


def test_replay_reads_what_was_kept() -> None:
    """One op is replayed where its input is kept, which then stays at least until the replay."""
    found = residency(Problem(FOUR), {3: "recompute"})
    assert found.needed_at == {3: 10}
    assert found.replay_seconds == {10: 1.0}
    assert found.num_replayed == 1
    assert found.transient_bytes == {10: 0}


def test_chain_is_replayed_once_with_memo() -> None:
    """The first unpack replays the whole chain; the values on the way stay for their own unpacks."""
    found = residency(Problem(FOUR), dict.fromkeys((2, 3, 4), "recompute"))
    assert found.num_replayed == 3
    assert found.replay_seconds == {8: 3.0}
    assert found.needed_at == {4: 8, 3: 8, 2: 8}
    assert found.transient_bytes == {8: 0}


def test_chain_is_replayed_each_time_without_memo() -> None:
    """Without memo each unpack replays its own chain: 3 + 2 + 1 ops, and values on the way are transient."""
    recomputed = (2, 3, 4)
    found = residency(Problem(FOUR), dict.fromkeys(recomputed, "recompute"), frozenset(recomputed))
    assert found.num_replayed == 6
    assert found.replay_seconds == {8: 3.0, 10: 2.0, 12: 1.0}
    assert found.needed_at == {4: 8, 3: 10, 2: 12}
    assert found.transient_bytes == {8: 30, 10: 20, 12: 0}


def test_swapped_link_comes_back_for_a_replay() -> None:
    """A replay that reads a swapped storage brings it back early, and it stays for its own unpack."""
    found = residency(Problem(FOUR), {2: "swap", 3: "recompute"})
    assert found.needed_at == {3: 10, 2: 10}
    assert found.num_replayed == 1


def test_input_already_released_is_held_for_the_replay() -> None:
    """A kept input that autograd drops early stays for a later replay that reads it."""
    b = GraphBuilder()
    x = b.given(1)
    first = b.make(10, x)
    save_first = b.pack(first)
    second = b.make(20, first)
    save_second = b.pack(second)
    b.drop(first, second)
    b.backward()
    b.unpack(save_first)  # tick 4, before the one that needs it
    b.release(save_first)
    b.op()
    b.unpack(save_second)  # tick 6
    b.release(save_second)
    found = residency(Problem(b.build()), {2: "recompute"})
    assert found.held_until == {1: 7, 2: 7}
    assert found.num_replayed == 1


def test_value_that_the_program_still_holds_is_not_replayed() -> None:
    """What lives on in the program (an output, a residual) costs nothing at its unpack."""
    b = GraphBuilder()
    value = b.make(10, b.given(1))
    save = b.pack(value)
    b.backward()
    b.unpack(save)
    b.release(save)
    b.op()
    for action in ("swap", "recompute"):
        found = residency(Problem(b.build()), {1: action})
        assert (found.needed_at, found.num_replayed) == ({}, 0)


def test_in_place_chain_is_replayed_from_its_start() -> None:
    """A value written in place twice is made by three ops, on memory counted once."""
    b = GraphBuilder()
    value = b.make(10, b.given(1))
    for _ in range(2):
        (value,) = b.op((value,), writes=(value,))
    save = b.pack(value)
    b.drop(value)
    b.backward()
    b.unpack(save)
    b.release(save)
    found = residency(Problem(b.build()), {1: "recompute"})
    assert found.num_replayed == 3
    assert found.needed_at == {1: 4}
    assert found.transient_bytes == {4: 0}


def test_unsaved_values_on_the_way_are_transient() -> None:
    """A temporary of 100 bytes between two saved values is made again, and counted while it is there."""
    b = GraphBuilder()
    temporary = b.make(100, b.given(1))
    value = b.make(10, temporary)
    save = b.pack(value)
    b.drop(temporary, value)
    b.backward()
    b.unpack(save)
    b.release(save)
    found = residency(Problem(b.build()), {2: "recompute"})
    assert found.num_replayed == 2
    assert found.transient_bytes == {3: 100}


def test_workspace_of_a_replayed_op_is_transient() -> None:
    """It comes on top of what is there while that op runs, not on top of the largest moment of the chain."""

    def transient(first: int, second: int) -> int:
        b = GraphBuilder()
        (temporary,) = b.op((b.given(1),), (100,), workspace_bytes=first)
        (value,) = b.op((temporary,), (10,), workspace_bytes=second)
        save = b.pack(value)
        b.drop(temporary, value)
        b.backward()
        b.unpack(save)
        b.release(save)
        return residency(Problem(b.build()), {2: "recompute"}).transient_bytes[3]

    assert transient(0, 0) == 100  # both results, less the one that stays
    assert transient(0, 5) == 105
    assert transient(5, 0) == 100
    assert transient(15, 0) == 105


def test_both_results_of_an_op_are_made_by_one_replay() -> None:
    """Two saved results of one op cost one replay, and the second is at hand afterwards."""
    b = GraphBuilder()
    first, second = b.op((b.given(1),), (10, 20))
    saves = [b.pack(first), b.pack(second)]
    b.drop(first, second)
    b.backward()
    for save in saves:
        b.unpack(save)
        b.release(save)
    found = residency(Problem(b.build()), {1: "recompute", 2: "recompute"})
    assert found.num_replayed == 1
    assert found.needed_at == {1: 3, 2: 3}


def test_in_place_replay_copies_what_another_replayed_op_still_reads() -> None:
    """A temporary that is overwritten while a later op of the chain reads it is there twice."""

    def transient(*, is_read_later: bool) -> int:
        b = GraphBuilder()
        first = b.make(100, b.given(1))
        other = b.make(7, first)
        (second,) = b.op((first,), writes=(first,))
        value = b.make(10, second, other) if is_read_later else b.make(10, second)
        save = b.pack(value)
        b.drop(first, other, value)
        b.backward()
        b.unpack(save)
        b.release(save)
        return residency(Problem(b.build()), {3: "recompute"}).transient_bytes[5]

    assert transient(is_read_later=False) == 100  # in place; the result of 10 stays
    assert transient(is_read_later=True) == 100 + 100 + 7 - 10  # while the second of its readers is replayed


def test_always_kept_input_is_held_for_the_replay() -> None:
    """What a plan has no choice about is held by recorded calls like anything else."""
    assert residency(Problem(_early_kept()), {2: "recompute"}).held_until == {1: 7, 2: 7}


def _early_kept() -> StepGraph:
    b = GraphBuilder()
    first = b.make(10, b.given(1))
    save_first = b.pack(first, must_keep=True)
    second = b.make(20, first)
    save_second = b.pack(second)
    b.drop(first, second)
    b.backward()
    b.unpack(save_first)  # tick 4
    b.release(save_first)
    b.op()
    b.unpack(save_second)  # tick 6
    b.release(save_second)
    return b.build()


def test_held_input_takes_memory_until_the_replay() -> None:
    """It does so at the tick at which only the recorded call has it, and without a replay it does not."""
    problem = Problem(_early_kept())
    kept, recomputed = (simulate(problem, actions, DEVICE).memory for actions in ({}, {2: "recompute"}))
    assert kept.tolist() == [11, 11, 31, 31, 31, 21, 21, 1]
    assert recomputed.tolist() == [11, 11, 31, 31, 11, 11, 31, 1]
