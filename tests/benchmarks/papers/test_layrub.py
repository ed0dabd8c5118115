"""Layrub's intermediates do not grow with the depth."""

from __future__ import annotations

import pytest

from benchmarks.papers.layrub import all_bytes, constant_bytes

MIB = 1 << 20
DEPTHS = [(3, 4, 6, 3), (3, 4, 23, 3), (3, 8, 36, 3), (6, 32, 289, 6), (6, 32, 461, 6)]


@pytest.mark.parametrize("blocks", DEPTHS)
def test_intermediates_are_those_of_the_paper(blocks: tuple[int, int, int, int]) -> None:
    """759.5 MiB at a batch of 32, from ResNet-50 to ResNet-1517."""
    assert constant_bytes(blocks, 32) == 759.5 * MIB


def test_all_blocks_grow_with_the_depth() -> None:
    """What would be there without offloading is a multiple of that."""
    totals = [all_bytes(blocks, 32) for blocks in DEPTHS]
    assert totals == sorted(totals)
    assert totals[0] > 5 * constant_bytes(DEPTHS[0], 32)
