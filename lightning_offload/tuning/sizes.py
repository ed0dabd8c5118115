"""The batch sizes worth a trial: round ones, dense enough for the answer, and those that came up.

Sizes of few significant bits suit the tiles of matrix kernels, and four to the octave are dense enough: a neighbour is
at most a quarter larger, and a size is only called too large where one below three quarters of it does as well.
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["between", "grid", "round_down"]

_BITS = 3  # significant bits of a round size
_NUM_HALVINGS = 3  # of a gap between two sizes


def grid(low: int, high: int, others: Iterable[int] = (), *, bits: int = _BITS) -> list[int]:
    """List the round sizes from low to high, both included, with others that lie between.

    Args:
        low: The smallest.
        high: The largest.
        others: More sizes; those outside are left out.
        bits: Significant bits of a round size: 3 gives four to the octave.
    """
    sizes = {low, high, *(size for size in others if low <= size <= high)}
    size = low
    while size <= high:
        if round_down(size, bits) == size:
            sizes.add(size)
        size = round_down(size, bits) + _step(size, bits)
    return sorted(sizes)


def round_down(size: int, bits: int = _BITS) -> int:
    """Return the largest round size that is not above this one."""
    return size // _step(size, bits) * _step(size, bits)


def between(low: int, high: int) -> list[int]:
    """List sizes that cut an open interval: three rounds of halving, each cut as round as it can be."""
    cuts: list[int] = []
    gaps = [(low, high)]
    for _ in range(_NUM_HALVINGS):
        found = [(a, _middle(a, b), b) for a, b in gaps if b - a > 1]
        cuts += [cut for _, cut, _ in found]
        gaps = [gap for a, cut, b in found for gap in ((a, cut), (cut, b))]
    return sorted(cuts)


def _step(size: int, bits: int) -> int:
    """Distance of the round sizes about a size."""
    return 1 << max(0, size.bit_length() - bits)


def _middle(low: int, high: int) -> int:
    """Return the roundest size in the middle half of an interval, of those the nearest to its middle."""
    middle, quarter = (low + high) // 2, (high - low) // 4
    for bit in reversed(range(quarter.bit_length())):
        step = 1 << bit
        size = (middle + step // 2) // step * step
        if low + quarter <= size <= high - quarter:
            return size
    return middle
