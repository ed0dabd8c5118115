"""The search finds the largest size that fits, and needs few measurements."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.papers import searches


@given(st.integers(1, 900), st.integers(1, 50), st.integers(0, 1000), st.integers(-3, 3))
def test_secant_finds_the_largest(answer: int, slope: int, base: int, bend: int) -> None:
    """The largest integer whose measure is within the limit, linear or nearly so."""

    def measure(n: int) -> int:
        return base + 10 * slope * n + bend * (n % 3)

    found = searches.secant(measure, measure(answer), low=1, high=400)
    assert measure(found) <= measure(answer) < measure(found + 1)


def test_secant_of_a_line_takes_few_measurements() -> None:
    """Two points give the answer, two more prove it."""
    measured: list[int] = []

    def measure(n: int) -> int:
        measured.append(n)
        return 7 + 13 * n

    assert searches.secant(measure, 7 + 13 * 788, low=60, high=600) == 788
    assert len(measured) <= 4


@pytest.mark.parametrize("kink", [3, 500, 1999])
def test_kinks_cost_no_more_than_bisection(kink: int) -> None:
    """Where the measure is steep at first, or flat, three times the measurements of a bisection are enough."""
    measured: list[int] = []

    def measure(n: int) -> int:
        measured.append(n)
        return 1000 * min(n, kink) + max(0, n - kink)

    assert searches.secant(measure, measure(1700), low=1, high=2000) == 1700
    assert len(measured) <= 3 * 11 + 3


def test_secant_says_zero_where_nothing_fits() -> None:
    """The lower end must fit."""
    assert searches.secant(lambda n: n, 3, low=4, high=9) == 0
