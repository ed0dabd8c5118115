"""Where copies back are issued, against a walk unpack by unpack."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_offload.planning.kernels.buffers import Gaps
from lightning_offload.planning.kernels.prefetches import BLOCK, LOOKAHEAD, issue
from tests.planning.step_strategies import SEEDS


def walk_back(
    ticks: list[int], starts: list[float], peaks: list[int], limit: int, unpack: int, by: float, size: int, away: int
) -> int:
    """One unpack after another, to the first that is early enough, while there is room."""
    chosen = -1
    for ordinal in range(unpack - 1, max(0, unpack - 1 - LOOKAHEAD) - 1, -1):
        if ticks[ordinal] < away or peaks[ordinal] + size > limit:
            break
        peaks[ordinal] += size
        chosen = ordinal
        if starts[ticks[ordinal]] <= by:
            break
    return chosen


@settings(max_examples=300)
@given(seed=SEEDS, count=st.integers(1, 5 * BLOCK))
def test_many_copies_are_issued_where_a_walk_would(seed: int, count: int) -> None:
    """Last need first, each finding less room than the one before; blocks and single unpacks give the same."""
    rng = random.Random(seed)
    ticks = sorted(rng.sample(range(4 * count), count))
    starts = sorted(rng.uniform(0, 100) for _ in range(4 * count))
    peaks = [rng.choice([rng.randint(0, 9), rng.randint(0, 50)]) for _ in ticks]
    tops = [max(peaks[i : i + BLOCK]) for i in range(0, count, BLOCK)]
    gaps = Gaps(list(peaks), tops, [0] * len(tops))
    for unpack in range(count - 1, -1, -rng.randint(1, 4)):
        wish = 60, unpack, rng.uniform(-50, 100), rng.randint(1, 8), rng.choice([0, rng.randint(0, 4 * count)])
        assert issue(ticks, starts, gaps, *wish) == walk_back(ticks, starts, peaks, *wish)
        now = [gaps.peaks[i] + gaps.extra[i // BLOCK] for i in range(unpack)]
        assert now == peaks[:unpack]
