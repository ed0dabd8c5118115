"""Whether a chosen batch size is right, on throughput that was measured or that is known.

Right means: throughput of at least (1 - tolerance - 0.02) of the best, and no size below 0.75 of the chosen one reaches
(1 - tolerance / 2) of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["MUCH_SMALLER", "Verdict", "judge", "most_best_over_chosen", "most_smaller_over_best"]

MUCH_SMALLER = 0.75
"""A size below this share of the chosen one should not do as well."""

_SLACK = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A choice against a curve.

    Attributes:
        best_size: The fastest size.
        best_over_chosen: Its throughput over that of the choice, at least 1.
        smaller_size: The fastest of the sizes below 0.75 of the choice; None where the curve has none.
        smaller_over_best: Its throughput over the best.
        is_right: Whether the choice is right.
    """

    best_size: int
    best_over_chosen: float
    smaller_size: int | None
    smaller_over_best: float | None
    is_right: bool


def judge(chosen: int, speeds: Mapping[int, float], tolerance: float) -> Verdict:
    """Judge a choice.

    Args:
        chosen: The size.
        speeds: Samples per second by size, the chosen one's among them.
        tolerance: How far below the best the choice was allowed to be, as a fraction.

    Returns:
        The verdict on these sizes; it says nothing of those between them.
    """
    best_size = max(speeds, key=lambda size: (speeds[size], -size))
    best = speeds[best_size]
    smaller = {size: speed for size, speed in speeds.items() if size < MUCH_SMALLER * chosen}
    smaller_size = max(smaller, key=lambda size: (smaller[size], -size), default=None)
    smaller_over_best = smaller[smaller_size] / best if smaller_size is not None else None
    is_fast = best / speeds[chosen] <= most_best_over_chosen(tolerance)
    is_small = smaller_over_best is None or smaller_over_best < most_smaller_over_best(tolerance)
    return Verdict(
        best_size=best_size,
        best_over_chosen=best / speeds[chosen],
        smaller_size=smaller_size,
        smaller_over_best=smaller_over_best,
        is_right=is_fast and is_small,
    )


def most_best_over_chosen(tolerance: float) -> float:
    """How much faster the best may be than a right choice, as a ratio."""
    return 1 / (1 - tolerance - _SLACK)


def most_smaller_over_best(tolerance: float) -> float:
    """What share of the best a much smaller size must stay below."""
    return 1 - tolerance / 2
