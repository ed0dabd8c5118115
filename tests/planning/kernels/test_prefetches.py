"""Where copies back are issued: against a walk unpack by unpack, and against figures worked out by hand."""

from __future__ import annotations

import dataclasses
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_offload.graph.memory_plan import Action
from lightning_offload.planning.kernels.buffers import Gaps
from lightning_offload.planning.kernels.prefetches import BLOCK, issue
from lightning_offload.planning.problem import Problem
from lightning_offload.planning.simulator import Schedule, Timeline, simulate
from tests.graph.building import DEVICE, chain
from tests.planning.step_strategies import SEEDS


def walk_back(
    ticks: list[int], starts: list[float], peaks: list[int], limit: int, unpack: int, by: float, size: int, away: int
) -> int:
    """One unpack after another, to the first that is early enough, while there is room."""
    chosen = -1
    for ordinal in range(unpack - 1, -1, -1):
        if ticks[ordinal] < away or peaks[ordinal] + size > limit:
            break
        peaks[ordinal] += size
        chosen = ordinal
        if starts[ticks[ordinal]] <= by:
            break
    return chosen


@settings(max_examples=300)
@given(seed=SEEDS, count=st.integers(1, 5 * BLOCK), in_order=st.booleans())
def test_many_copies_are_issued_where_a_walk_would(seed: int, count: int, in_order: bool) -> None:
    """From either end, each finding less room than the one before; blocks and single unpacks give the same."""
    rng = random.Random(seed)
    ticks = sorted(rng.sample(range(4 * count), count))
    starts = sorted(rng.uniform(0, 100) for _ in range(4 * count))
    peaks = [rng.choice([rng.randint(0, 9), rng.randint(0, 50)]) for _ in ticks]
    tops = [max(peaks[i : i + BLOCK]) for i in range(0, count, BLOCK)]
    gaps = Gaps(list(peaks), tops, [0] * len(tops))
    unpacks = range(count - 1, -1, -rng.randint(1, 4))
    for unpack in reversed(unpacks) if in_order else unpacks:
        wish = 60, unpack, rng.uniform(-50, 100), rng.randint(1, 8), rng.choice([0, rng.randint(0, 4 * count)])
        assert issue(ticks, starts, gaps, *wish) == walk_back(ticks, starts, peaks, *wish)
        now = [gaps.peaks[i] + gaps.extra[i // BLOCK] for i in range(count)]
        assert now == peaks


def test_copies_come_as_far_ahead_as_there_is_room() -> None:
    """All the way, where they should have begun before the step."""
    count = 200 * BLOCK
    gaps = Gaps([0] * count, [0] * (count // BLOCK + 1), [0] * (count // BLOCK + 1))
    ticks, starts = list(range(count)), [1.0] * count
    assert [issue(ticks, starts, gaps, 100, unpack, 0.0, 1, 0) for unpack in (1, count - 5, count - 1)] == [0, 0, 0]


def swap(sizes: tuple[int, ...], h2d: float, limit_bytes: int, count: int, prefetch: dict[int, int]) -> Timeline:
    """Swap the first results of a chain of four; copies out take next to no time.

    Unpacks are at ticks 8, 10, 12 and 14, which begin at 4, 5, 6 and 7 seconds; the third result is needed at the
    second of them, the second at the third, the first at the last.

    Args:
        sizes: Bytes of the results.
        h2d: Bytes per second.
        limit_bytes: Most bytes on the device.
        count: How many of the results.
        prefetch: When to issue copies back; chosen where it is empty.
    """
    device = dataclasses.replace(DEVICE, d2h_bytes_per_second=1e15, h2d_bytes_per_second=h2d)
    problem = Problem(chain(*sizes))
    actions: dict[int, Action] = dict.fromkeys(range(1, count + 1), "swap")
    chosen = simulate(problem, actions, device, limit_bytes=limit_bytes)
    if not prefetch:
        return chosen
    schedule = Schedule(release=chosen.release_tick, prefetch=prefetch)
    return simulate(problem, actions, device, limit_bytes=limit_bytes, schedule=schedule)


def test_first_need_first_where_its_copy_is_what_room_is_for() -> None:
    """Copies of 1.5 s, and room for one of them from 5 s on, for both from 6 s on.

    In the order of needs the copies run from 5 s to 6.5 s and from there to 8 s, half a second late each. Had the
    last need taken the room, the other copy would run from 6.5 s to 8 s, two seconds late.
    """
    timeline = swap((20, 20, 20, 20), 20 / 1.5, 160, 2, {})
    assert timeline.prefetch == {1: 2, 2: 1}
    assert timeline.memory.tolist()[8:14] == [140, 150, 150, 160, 150, 160]
    assert (timeline.stall_seconds, timeline.step_seconds) == pytest.approx((1.0, 9.0))
    other = swap((20, 20, 20, 20), 20 / 1.5, 160, 2, {1: 1, 2: -1})
    assert (other.stall_seconds, other.step_seconds) == pytest.approx((2.0, 10.0))


def test_last_need_first_where_there_is_no_room_for_the_first() -> None:
    """The first result of 20 bytes has room from 4 s on and takes 2.5 s; the second, of 60, 7.5 s on demand at 6 s.

    The lane is busy from 4 s to 14 s, eight seconds of which compute waits. In order it would stand idle until 6 s.
    """
    timeline = swap((20, 60, 40, 40), 8.0, 210, 2, {})
    assert timeline.prefetch == {1: 0, 2: -1}
    assert timeline.memory.tolist()[8:14] == [200, 210, 170, 180, 190, 200]
    assert (timeline.stall_seconds, timeline.step_seconds) == pytest.approx((8.0, 16.0))
    other = swap((20, 60, 40, 40), 8.0, 210, 2, {1: 2, 2: -1})
    assert (other.stall_seconds, other.step_seconds) == pytest.approx((10.0, 18.0))


def test_in_order_no_copy_is_issued_before_one_that_is_needed_earlier() -> None:
    """The third result's copy is on demand, as its device copy goes no sooner than at tick 9; the others follow it.

    There is room for the second one from 4 s on, but it waits until 5 s, and the first one until the room for it at
    6 s. Had the last need chosen first, the second one would have found no room at all.
    """
    timeline = swap((40, 20, 20, 20), 20.0, 180, 3, {})
    assert timeline.release_tick[3] == 9
    assert timeline.prefetch == {1: 2, 2: 1, 3: -1}
    assert timeline.memory.tolist()[8:14] == [140, 130, 150, 160, 170, 180]
    assert timeline.step_seconds == pytest.approx(11.0)
    other = swap((40, 20, 20, 20), 20.0, 180, 3, {1: 1, 2: -1, 3: -1})
    assert other.step_seconds == pytest.approx(12.0)
