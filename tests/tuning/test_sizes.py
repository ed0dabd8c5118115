"""Round sizes, and cuts of an interval."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from lightning_offload.tuning.sizes import between, grid, round_down


def test_round_sizes_are_four_to_the_octave() -> None:
    """Small sizes are all there; then four to the octave, and the ends and the others given."""
    assert grid(1, 33, [13, 99]) == [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 13, 14, 16, 20, 24, 28, 32, 33]
    assert grid(100, 200, bits=2) == [100, 128, 192, 200]


@given(low=st.integers(1, 5000), more=st.integers(0, 5000))
def test_neighbours_are_close(low: int, more: int) -> None:
    """From one size of a grid to the next it is one sample or at most a quarter more."""
    sizes = grid(low, low + more)
    assert (sizes[0], sizes[-1]) == (low, low + more)
    assert all(0 < b - a <= max(1, a / 4) for a, b in itertools.pairwise(sizes))


@given(size=st.integers(1, 10**6))
def test_rounding_down(size: int) -> None:
    """It gives a round size, less than a quarter below."""
    rounded = round_down(size)
    assert round_down(rounded) == rounded
    assert 0.75 * size < rounded <= size


@given(low=st.integers(1, 5000), gap=st.integers(1, 5000))
def test_cuts_lie_inside_and_halve(low: int, gap: int) -> None:
    """Cuts are inside an open interval, no two alike, and leave no gap wider than three eighths of it twice over."""
    cuts = between(low, low + gap)
    assert all(low < cut < low + gap for cut in cuts)
    assert cuts == sorted(set(cuts))
    places = [low, *cuts, low + gap]
    assert max(b - a for a, b in itertools.pairwise(places)) <= max(1, 0.75**3 * gap + 3)


def test_cuts_are_round() -> None:
    """A wide interval is cut at sizes that suit tiles."""
    assert between(512, 1024) == [576, 640, 704, 768, 832, 896, 960]
