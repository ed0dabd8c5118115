"""Searches over batch sizes: exact answers, and few evaluations."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_offload.cli.batch_search import farthest_within, largest_within, most_efficient


def counted(function: Callable[[int], float]) -> tuple[Callable[[int], float], set[int]]:
    """A function and the set of arguments that it was evaluated at."""
    seen: set[int] = set()

    def wrapped(batch: int) -> float:
        seen.add(batch)
        return function(batch)

    return wrapped, seen


@given(
    fixed=st.integers(0, 10**9),
    each=st.integers(1, 10**8),
    budget=st.integers(1, 10**12),
    limit=st.integers(1, 10**5),
)
def test_the_largest_that_fits_is_exact(fixed: int, each: int, budget: int, limit: int) -> None:
    """For affine needs, which memory nearly is: the largest size within the budget and the limit, in few probes."""
    need, seen = counted(lambda batch: fixed + each * batch)
    expected = max(0, min(limit, (budget - fixed) // each))
    assert largest_within(need, budget, limit) == expected  # type: ignore[arg-type]
    assert len(seen) <= 14
    assert all(1 <= batch <= limit for batch in seen)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=200), st.integers(0, 400))
def test_the_largest_that_fits_for_any_growth(steps: list[int], budget: int) -> None:
    """Needs that grow in any way, stay the same included."""
    needs = [sum(steps[: i + 1]) for i in range(len(steps))]
    expected = sum(need <= budget for need in needs)
    assert largest_within(lambda batch: needs[batch - 1], budget, len(needs)) == expected


def test_probes_of_a_bent_need() -> None:
    """A need with a kink, as where recomputation stops to help, still takes far fewer probes than sizes."""
    need, seen = counted(lambda batch: 1000 + 10 * batch + 90 * max(0, batch - 300))
    assert largest_within(need, 20_000, 1 << 16) == 460  # type: ignore[arg-type]
    assert len(seen) <= 20


def test_the_most_efficient(subtests: pytest.Subtests) -> None:
    """A throughput with one peak: found to within a few percent of its height, at few sizes."""
    for peak in [1, 10, 77, 640, 1000]:
        with subtests.test(peak=peak):
            throughput, seen = counted(lambda batch, peak=peak: 1000 - 40 * abs((batch / peak) - 1))
            best = most_efficient(throughput, 1, 1000)
            assert throughput(best) >= 0.98 * 1000
            assert len(seen) <= 22


def test_a_range_of_one() -> None:
    """Where only one batch size fits, it is the answer."""
    assert most_efficient(float, 5, 5) == 5
    assert farthest_within(float, 1, 0, 0.03) == 1
    assert farthest_within(float, 5, 5, 0.03) == 5


def test_the_smallest_within_a_tolerance() -> None:
    """Throughput that saturates: the size at which 3% are missing, to 2% of the best size."""
    found = farthest_within(lambda batch: min(batch, 100) / 100, 200, 0, 0.03)
    assert 97 <= found <= 97 + 4


def test_the_largest_within_a_tolerance() -> None:
    """Throughput that falls beyond the best: the size at which 3% are missing; all of it if it never falls so far."""
    found = farthest_within(lambda batch: 1 - max(0, batch - 100) / 1000, 100, 1000, 0.03)
    assert 128 <= found <= 130
    assert farthest_within(lambda batch: 1.0, 100, 1000, 0.03) == 1000
