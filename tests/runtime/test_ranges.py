"""Ranges never overlap while they are out, merge when they come back, and tell of copies that still use them."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from lightning_offload.runtime.lanes import HostCopy
from lightning_offload.runtime.ranges import Ranges

SIZE = 4096


class RangesMachine(RuleBasedStateMachine):
    """Takes and gives in any order, at planned places too; each byte has an owner or none."""

    taken = Bundle("taken")

    def __init__(self) -> None:
        super().__init__()
        self.ranges = Ranges(SIZE)
        self.owner: list[int | None] = [None] * SIZE
        self.number = 0

    def _own(self, offset: int, num_bytes: int) -> tuple[int, int]:
        assert self.owner[offset : offset + num_bytes] == [None] * num_bytes
        self.number += 1
        self.owner[offset : offset + num_bytes] = [self.number] * num_bytes
        return offset, num_bytes

    def _longest_gap(self) -> int:
        longest = current = 0
        for owner in self.owner:
            current = current + 1 if owner is None else 0
            longest = max(longest, current)
        return longest

    @rule(target=taken, num_bytes=st.integers(1, 900))
    def take(self, num_bytes: int) -> tuple[int, int]:
        offset = self.ranges.take(num_bytes)
        if offset is None:
            assert self._longest_gap() < num_bytes
            return (0, 0)
        return self._own(offset, num_bytes)

    @rule(target=taken, offset=st.integers(0, SIZE - 1), num_bytes=st.integers(1, 900))
    def take_at(self, offset: int, num_bytes: int) -> tuple[int, int]:
        fits = offset + num_bytes <= SIZE and set(self.owner[offset : offset + num_bytes]) == {None}
        assert self.ranges.take_at(offset, num_bytes) == fits
        return self._own(offset, num_bytes) if fits else (0, 0)

    @rule(taken=consumes(taken))
    def give(self, taken: tuple[int, int]) -> None:
        offset, num_bytes = taken
        if num_bytes:
            self.ranges.give(offset, num_bytes)
            self.owner[offset : offset + num_bytes] = [None] * num_bytes

    @invariant()
    def free_ranges_are_the_bytes_without_an_owner(self) -> None:
        seen = [1] * SIZE
        end = -1
        for offset, size in self.ranges.free:
            assert offset > end  # ordered, and merged with its neighbours
            seen[offset : offset + size] = [0] * size
            end = offset + size
        assert [owner is None for owner in self.owner] == [mark == 0 for mark in seen]
        assert self.ranges.used_bytes == sum(seen)
        assert self.ranges.is_empty == (sum(seen) == 0)


TestRanges = RangesMachine.TestCase
TestRanges.settings = settings(max_examples=60, stateful_step_count=30)


def test_users_of_a_range_are_told_until_their_copies_are_done() -> None:
    """A range that comes back busy is free at once; whoever takes a part of it learns of the copy."""
    ranges = Ranges(100)
    busy, other = HostCopy(), HostCopy()
    assert ranges.take(60) == 0
    assert ranges.take(40) == 60
    ranges.give(0, 60, busy)
    ranges.give(60, 40, other)
    assert ranges.take_at(50, 20)
    assert set(ranges.users(50, 20)) == {busy, other}
    assert ranges.users(0, 10) == (busy,)
    busy.finish()
    assert ranges.users(50, 20) == (other,)
    other.finish()
    assert ranges.users(50, 20) == ()


def test_done_copies_are_not_remembered() -> None:
    """A range whose copy is done has no users."""
    ranges, done = Ranges(10), HostCopy()
    done.finish()
    assert ranges.take(10) == 0
    ranges.give(0, 10, done)
    assert ranges.users(0, 10) == ()


def test_ranges_grow_at_the_end() -> None:
    """What is added joins what is free before it."""
    ranges = Ranges(0)
    assert ranges.is_empty
    assert ranges.take(1) is None
    ranges.extend(10)
    assert ranges.take(10) == 0
    ranges.extend(5)
    ranges.give(0, 10)
    assert ranges.free == [(0, 15)]


class _Counted(HostCopy):
    """Notes how often it is asked whether it is done."""

    num_asked = 0

    @property
    def is_done(self) -> bool:
        _Counted.num_asked += 1
        return super().is_done


def test_few_copies_are_asked() -> None:
    """Of many under way only the oldest and those that use the range; none twice once it is known to be done."""
    ranges, copies = Ranges(100), [_Counted() for _ in range(100)]
    assert ranges.take(100) == 0
    for i, copy in enumerate(copies):
        ranges.give(i, 1, copy)
    _Counted.num_asked = 0
    assert ranges.users(50, 2) == tuple(copies[50:52])
    assert _Counted.num_asked <= 3
    for copy in copies[:80]:
        copy.finish()
    assert ranges.users(50, 2) == ()
    _Counted.num_asked = 0
    assert ranges.users(90, 1) == (copies[90],)
    assert _Counted.num_asked <= 2
