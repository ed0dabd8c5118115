"""What is certain about replays and absence, by hand."""

from __future__ import annotations

from lightning_offload.planning.problem import Problem
from lightning_offload.planning.relaxation.facts import NEVER, find_items
from tests.graph.building import GraphBuilder, chain


def test_absence_lies_between_death_and_first_read() -> None:
    """In a chain each result dies when the next one is made and is read back in reverse order."""
    problem = Problem(chain(20, 30, 40))
    items = find_items(problem)
    assert [i.candidate.storage for i in items] == [1, 2, 3]
    assert all(i.until == i.read_at and i.is_read for i in items)
    assert items[0].read_at > items[1].read_at > items[2].read_at == problem.unpacks[0].tick


def test_replay_in_a_chain_reads_the_result_before() -> None:
    """Each op of a chain stands for itself; its replay reads the one before, which may be made on the way."""
    items = find_items(Problem(chain(20, 30, 40)))
    assert [i.ops for i in items] == [(0,), (1,), (2,)]
    assert [i.behind for i in items] == [(), (0,), (1,)]
    assert [i.consumers for i in items] == [(1,), (2,), ()]
    assert [i.earliest for i in items] == [items[2].read_at] * 3


def test_when_it_may_be_back_before_its_read() -> None:
    """At the first read of anything that it may be made for, and at that of what is made from it."""
    items = find_items(Problem(chain(10, 20, 30, 40)))
    reads = [item.read_at for item in items]
    assert items[3].returns == ()
    assert items[2].returns == ((reads[3], reads[2]),)
    assert items[1].returns == ((reads[3], reads[2]), (reads[2], reads[1]))
    assert items[0].returns == ((reads[3], reads[2]), (reads[1], reads[0]))  # not known from reads[2] to reads[1]


def unsaved_between(*, held: bool) -> Problem:
    """A saved result made from an unsaved one, which the program may hold until the end of the step."""
    b = GraphBuilder()
    first = b.make(30, b.given(10))
    packs = [b.pack(first)]
    between = b.make(20, first)
    last = b.make(40, between)
    packs.append(b.pack(last))
    b.drop(first, last, *([] if held else [between]))
    b.backward()
    for pack in reversed(packs):
        b.unpack(pack)
        b.drop(b.make(5))
        b.release(pack)
    b.op()
    return Problem(b.build())


def test_unsaved_values_are_made_again() -> None:
    """A replay runs the ops of what is not saved, up to saved values."""
    first, last = find_items(unsaved_between(held=False))
    assert set(last.ops) == {1, 2}
    assert last.behind == (0,)
    assert first.consumers == (1,)


def test_what_the_program_holds_need_not_be_made() -> None:
    """What is still alive in backward is read where it lies, and nothing behind it is needed."""
    first, last = find_items(unsaved_between(held=True))
    assert last.ops == (2,)
    assert last.behind == ()
    assert first.consumers == (1,)  # it might still be, as far as is known without a plan


def test_siblings_may_be_made_on_the_way() -> None:
    """Two results of one op are replayed at once."""
    b = GraphBuilder()
    made = b.op((b.given(1),), (30, 40))
    packs = [b.pack(v) for v in made]
    b.drop(*made)
    b.backward()
    for pack in packs:
        b.unpack(pack)
        b.op()
        b.release(pack)
    items = find_items(Problem(b.build()))
    assert [i.sharers for i in items] == [(1,), (0,)]
    assert [i.returns for i in items] == [(), ((items[0].read_at, items[1].read_at),)]


def test_unread_saves_are_absent_to_their_end() -> None:
    """What autograd drops unread may be away until then, and no replay of it is certain."""
    b = GraphBuilder()
    made = b.make(100, b.given(1))
    pack = b.pack(made)
    b.drop(made)
    b.op()
    b.release(pack)
    b.op()
    (item,) = find_items(Problem(b.build()))
    assert not item.is_read
    assert item.until == item.candidate.release
    assert item.earliest == NEVER


def test_nothing_is_recomputed_that_must_not_be() -> None:
    """Storages may be forbidden to be recomputed; they can still be swapped."""
    first, second = find_items(Problem(chain(20, 30)), no_recompute={2})
    assert first.candidate.can_recompute
    assert not second.candidate.can_recompute
    assert second.candidate.can_swap
