"""The search finds the largest size that fits, and needs few measurements."""

from __future__ import annotations

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
