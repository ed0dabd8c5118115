"""How much of what could be tried is: a share of it in `make test`, everything where the environment asks for that.

Protocol: `LIGHTNING_OFFLOAD_TESTS=all` (`make test-all`, `make test-catalogue`) runs each combination, sample and step
that tests have; without it those that repeat what others show are left out, always the same ones.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

_A = TypeVar("_A")
_B = TypeVar("_B")

VARIABLE = "LIGHTNING_OFFLOAD_TESTS"
"""The environment variable that, set to "all", leaves nothing out."""


def is_all() -> bool:
    """Whether nothing is left out."""
    return os.environ.get(VARIABLE) == "all"


def examples(num: int) -> int:
    """How many examples hypothesis draws: a fifth of them, or all."""
    return num if is_all() else -(-num // 5)


def share(items: Sequence[_A], every: int) -> list[_A]:
    """One in so many items; all of them where nothing is left out."""
    return list(items[:: 1 if is_all() else every])


def pairs(first: Sequence[_A], second: Sequence[_B], every: int) -> list[tuple[_A, _B]]:
    """One in so many pairs, in which each item comes as often as another; all pairs where nothing is left out.

    Args:
        first: At least as many as are skipped, as `second` is, for each item to be among them.
        second: The others.
        every: How many pairs stand for one.
    """
    step = 1 if is_all() else every
    return [(a, b) for i, a in enumerate(first) for j, b in enumerate(second) if (i + j) % step == 0]
