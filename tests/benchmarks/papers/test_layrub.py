"""Layrub's intermediates do not grow with the depth."""

from __future__ import annotations

import pytest

from benchmarks.papers.layrub import constant_bytes

MIB = 1 << 20
DEPTHS = [(3, 4, 6, 3), (3, 4, 23, 3), (3, 8, 36, 3), (6, 32, 289, 6), (6, 32, 461, 6)]


def test_intermediates_are_those_of_the_paper(subtests: pytest.Subtests) -> None:
    """759.5 MiB at a batch of 32, from ResNet-50 to ResNet-1517."""
    for blocks in DEPTHS:
        with subtests.test(blocks=blocks):
            assert constant_bytes(blocks, 32) == 759.5 * MIB
