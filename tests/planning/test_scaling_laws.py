"""Bytes and seconds of one tensor or op, as functions of the batch size."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_offload.planning.scaling_laws import (
    SizePolynomial,
    covering_line,
    exact_bytes,
    fit_seconds,
    given_bytes,
    is_exact,
)

SIZES = st.lists(st.integers(1, 64), min_size=2, max_size=5, unique=True).map(sorted)
THREE = st.lists(st.integers(1, 64), min_size=3, max_size=5, unique=True).map(sorted)
BYTES = st.integers(0, 10**12)


@given(SIZES, BYTES, BYTES, st.integers(1, 10**6))
def test_a_line_is_found_exactly(sizes: list[int], start: int, slope: int, n: int) -> None:
    """From two sizes or more, ``a + b*n`` is predicted to the byte at any size."""
    law = exact_bytes(sizes, [start + slope * x for x in sizes])
    assert law.at(n) == start + slope * n
    assert law.square == 0


@given(SIZES, st.integers(0, 10**9), st.integers(1, 10**6), st.integers(1, 10**5))
def test_pairs_of_samples_are_found_from_two_sizes(sizes: list[int], linear: int, square: int, n: int) -> None:
    """``b*n + c*n**2`` cannot be a line that is not negative at 0; it is predicted to the byte."""
    law = exact_bytes(sizes, [linear * x + square * x * x for x in sizes])
    assert law.at(n) == linear * n + square * n * n


@given(THREE, st.integers(1, 10**6), st.integers(1, 10**5))
def test_each_pair_once_is_found_from_three_sizes(sizes: list[int], unit: int, n: int) -> None:
    """``n * (n - 1) / 2`` results too, beyond the smallest size that was seen."""
    law = exact_bytes(sizes, [unit * x * (x - 1) // 2 * 4 for x in sizes])
    assert law.at(n + sizes[0]) == unit * (n + sizes[0]) * (n + sizes[0] - 1) // 2 * 4


def test_differences_along_the_batch_are_a_line_once_three_sizes_say_so() -> None:
    """``n - 1`` rows: three sizes show the line, two might be a parabola, which is the larger one."""
    assert exact_bytes([2, 4, 8], [4, 12, 28]).at(100) == 396
    assert exact_bytes([2, 4], [4, 12]).at(100) > 396


def test_fractions_are_rounded_up() -> None:
    """Where a size falls between bytes, the prediction is the next one; it never is below zero."""
    assert exact_bytes([2, 5], [10, 11]).at(3) == 11
    assert SizePolynomial(-100, 1).at(3) == 0
    assert exact_bytes([2, 4, 6], [1, 3, 5]).at(1) == 0


@pytest.mark.parametrize(
    ("sizes", "seen"),
    [([2, 4, 8], [16, 16, 32]), ([1, 2, 3, 4], [9, 9, 10, 13]), ([2, 4], [7, 5]), ([2, 4, 8], [8, 64, 512])],
    ids=["padded", "bent", "falling", "cubic"],
)
def test_what_is_no_simple_law_is_never_below_what_was_seen(sizes: list[int], seen: list[int]) -> None:
    """It is said to be inexact, and covers everything that was seen, also larger sizes."""
    law = exact_bytes(sizes, seen)
    assert not is_exact(law, sizes, seen)
    assert all(law.at(n) >= y for n, y in zip(sizes, seen, strict=True))
    assert law.at(100) >= max(seen)


@given(SIZES, st.data())
def test_workspaces_are_covered_by_a_line_that_rises(sizes: list[int], data: st.DataObject) -> None:
    """Nothing measured lies above it, it never falls, and at 0 it is not negative."""
    seen = data.draw(st.lists(BYTES, min_size=len(sizes), max_size=len(sizes)))
    law = covering_line(sizes, seen)
    assert all(law.at(n) >= y for n, y in zip(sizes, seen, strict=True))
    assert law.constant >= 0
    assert law.linear >= 0
    assert law.square == 0


@given(SIZES, BYTES, BYTES)
def test_workspaces_on_a_line_are_exact(sizes: list[int], start: int, slope: int) -> None:
    """Where the measurements are a line, it is that one."""
    assert covering_line(sizes, [start + slope * x for x in sizes]).at(1000) == start + slope * 1000


def test_what_depends_on_more_than_the_batch_is_constant_unless_three_sizes_agree() -> None:
    """Optimizer state that came into being between two recordings does not grow with the batch."""
    assert given_bytes([2, 4], [100, 300]).at(1000) == 300
    assert given_bytes([2, 4, 8], [100, 300, 300]).at(1000) == 300
    assert given_bytes([2, 4, 8], [100, 200, 400]).at(1000) == 50_000


def _growth(sizes: list[int], is_plain: list[bool]) -> Any:
    """By size and op: what it grows with; ops that are not plain touch bytes of pairs and of samples."""
    return np.array([[n if plain else 4 * n * n + 100 * n for plain in is_plain] for n in sizes], dtype=np.float64)


def test_seconds_are_exact_on_lines_and_on_touched_bytes() -> None:
    """Without noise, launching, samples and pairs of samples are told apart."""
    is_plain = [True, True, True, False]
    start, rise = np.array([1.0, 0.0, 3.0, 0.5]), np.array([0.0, 2.0, 0.25, 0.125])
    growth, far = _growth([2, 4, 8], is_plain), _growth([100], is_plain)[0]
    laws = fit_seconds(growth, start + rise * growth, np.array(is_plain))
    assert np.allclose(laws.at(far), start + rise * far, rtol=1e-9)


@given(SIZES, st.integers(0, 2**32 - 1))
def test_seconds_are_never_negative(sizes: list[int], seed: int) -> None:
    """Whatever was measured, no op takes less than nothing at any size, and none gets faster with it."""
    rng = np.random.default_rng(seed)
    is_plain = [True, True, False, True, False]
    seen = rng.exponential(size=(len(sizes), 5)) * rng.choice([0.0, 1.0], size=5)
    laws = fit_seconds(_growth(sizes, is_plain), seen, np.array(is_plain))
    small, large = _growth([1, 1000], is_plain)
    assert (laws.at(small) >= 0).all()
    assert (laws.at(large) >= laws.at(small)).all()


def test_noise_does_not_add_up() -> None:
    """2,000 noisy ops of which none may fall: their sum has the least squares, not the bias that cutting gives it."""
    rng = np.random.default_rng(0)
    sizes, is_plain = [4, 8, 16], [True] * 2000
    seen = np.array([1e-3 * (1 + 0.3 * rng.standard_normal(2000)) + n * 1e-5 for n in sizes])
    laws = fit_seconds(_growth(sizes, is_plain), seen, np.array(is_plain))
    assert (laws.rise >= 0).all()
    slope, start = np.polyfit(sizes, seen.sum(axis=1), 1)
    assert laws.at(np.full(2000, 64.0)).sum() == pytest.approx(start + slope * 64, rel=1e-9)
    cut = np.maximum(np.polyfit(sizes, seen, 1)[0], 0).sum()
    assert cut > 1.3 * slope  # what would have been extrapolated otherwise


def test_a_cold_first_step_does_not_hide_growth() -> None:
    """The smallest size was recorded first and took ten times as long: the slope is that of the others, nearly."""
    growth = _growth([2, 4, 8], [True] * 3)
    seen = growth * np.array([[10.0], [1.0], [1.0]])
    far = fit_seconds(growth, seen, np.ones(3, dtype=np.bool_)).at(np.full(3, 64.0))
    assert (far > 0.7 * 64).all()
    assert (far <= 64).all()


@pytest.mark.parametrize("seen", [[1.0, 3.0, 9.0], [2.0, 2.0, 2.1], [1.0, 1.0, 9.0], [0.0, 0.0, 0.0]], ids=str)
@pytest.mark.parametrize("is_plain", [True, False], ids=["samples", "pairs"])
def test_the_constrained_fit_is_the_best_one(seen: list[float], is_plain: bool) -> None:
    """No start and rise in a fine grid has smaller squares than the closed form."""
    growth = _growth([1, 2, 6], [is_plain])
    laws = fit_seconds(growth, np.array(seen)[:, None], np.array([is_plain]))
    best = float(sum((laws.at(x)[0] - y) ** 2 for x, y in zip(growth, seen, strict=True)))
    starts = np.linspace(0, 10, 201)
    rises = starts / growth[-1] * 6
    others = sum((starts[:, None] + rises[None] * x - y) ** 2 for x, y in zip(growth[:, 0], seen, strict=True))
    assert best <= float(np.min(others)) + 1e-12


def test_laws_are_whole_numbers() -> None:
    """A third of a byte for each sample stays exact at any size."""
    law = exact_bytes([3, 9], [1, 3])
    assert law.at(3 * 10**15) == 10**15
    assert Fraction(law.linear, law.divisor) == Fraction(1, 3)
