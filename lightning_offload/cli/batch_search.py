"""Searches over batch sizes: the largest that fits, and those that are about as efficient as the best.

Each evaluation plans a step, and perhaps captures it, which takes seconds: memory is nearly affine in the batch size,
so the largest batch is found by interpolation, guarded by bisection, in a handful of evaluations; the most efficient
one on a geometric grid that is refined around its best point.
"""

from __future__ import annotations

from collections.abc import Callable

_FIRST_PROBE = 8  # samples, from which sizes are extrapolated
_GROWTH = 64  # the most by which an extrapolation may go beyond what is known
_NUM_GRID = 7  # sizes of a round, equally far apart in ratio
_NUM_REFINEMENTS = 2  # rounds, each between the neighbours of the best


def largest_within(num_bytes: Callable[[int], int], budget_bytes: int, limit: int) -> int:
    """The largest batch size whose need is within a budget, 0 if not even one sample is, at most a limit.

    Args:
        num_bytes: Need of a batch size; grows with it.
        budget_bytes: What there is.
        limit: The largest batch size to try, 1 or more.
    """
    low, high = 0, limit + 1
    probe, was_slow = 1, False
    while high - low > 1:
        if was_slow:
            probe = (low + high) // 2
        width = high - low
        if num_bytes(probe) <= budget_bytes:
            low = probe
        else:
            high = probe
        was_slow = high <= limit and 2 * (high - low) > width and not was_slow
        probe = _next_probe(num_bytes, budget_bytes, low, high, limit)
    return low


def _next_probe(num_bytes: Callable[[int], int], budget_bytes: int, low: int, high: int, limit: int) -> int:
    """Where the need, taken as affine, meets the budget; strictly between what fits and what does not."""
    if low < 2:
        guess = _FIRST_PROBE if high > limit else (low + high) // 2
    else:
        other = high if high <= limit else 1
        slope = (num_bytes(other) - num_bytes(low)) / (other - low)
        beyond = (budget_bytes - num_bytes(low)) / slope if slope > 0 else float(limit)
        guess = low + int(min(beyond, _GROWTH * low))
    return min(max(guess, low + 1), high - 1)


def most_efficient(throughput: Callable[[int], float], low: int, high: int) -> int:
    """The batch size of the highest throughput within a range, to the resolution of a refined geometric grid."""
    left, right = low, high
    best = low
    for _ in range(1 + _NUM_REFINEMENTS):
        grid = _geometric(left, right)
        best = max({*grid, best}, key=lambda batch: (throughput(batch), -batch))
        if len(grid) <= 3:
            break
        left = max((batch for batch in grid if batch < best), default=left)
        right = min((batch for batch in grid if batch > best), default=right)
    return best


def farthest_within(throughput: Callable[[int], float], best: int, end: int, tolerance: float) -> int:
    """The batch size farthest from the best one that is within a tolerance of its throughput; to 2%.

    Args:
        throughput: Samples per second of a batch size; taken to fall from the best one on.
        best: The batch size of the highest throughput.
        end: Where to look: up to the largest that fits, or down to 0.
        tolerance: Share of that throughput which may be lost.
    """
    enough = (1 - tolerance) * throughput(best)
    if end and throughput(end) >= enough:
        return end
    inside, outside = best, end
    while abs(outside - inside) > max(1, max(best, inside) // 50):
        middle = (inside + outside) // 2
        if throughput(middle) >= enough:
            inside = middle
        else:
            outside = middle
    return inside


def _geometric(low: int, high: int) -> list[int]:
    ratio = high / low
    return sorted({round(low * ratio ** (i / (_NUM_GRID - 1))) for i in range(_NUM_GRID)})
