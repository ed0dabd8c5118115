"""The search for the largest batch: near the truth, in few trials, whatever the need looks like."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from benchmarks.gpu.search import BatchSearch, Trial


def search(largest: int, *, first: int, fixed: int = 0, tells: bool = True) -> tuple[BatchSearch, int]:
    """Search where `largest` samples fit, each needing ten bytes beside `fixed` ones; also the number of trials."""
    state = BatchSearch(cap_bytes=fixed + 10 * largest + 5, first=first)
    num_trials = 0
    while (size := state.next()) is not None:
        assert size not in state.trials, "a size is tried twice"
        assert size >= 1
        fits = size <= largest
        state.trials[size] = Trial(fits=fits, need_bytes=fixed + 10 * size if fits or tells else None)
        num_trials += 1
        assert num_trials < 40
    return state, num_trials


@given(
    largest=st.integers(1, 5000),
    first=st.integers(1, 3000),
    fixed=st.integers(0, 40_000),
    tells=st.booleans(),
)
@example(largest=1, first=3000, fixed=0, tells=False)
def test_the_largest_batch_is_found(largest: int, first: int, fixed: int, tells: bool):
    """What is found fits, and is within two per cent of the largest that does, or the trials were used up."""
    state, num_trials = search(largest, first=first, fixed=fixed, tells=tells)
    assert 1 <= state.best <= largest
    if num_trials < 10:
        assert largest - state.best <= max(1, 0.02 * state.best)


def test_few_trials_are_enough():
    """Where need is a straight line and the first guess is not absurd, it takes at most seven trials."""
    for largest, first in ((130, 120), (400, 120), (90, 300), (1000, 150)):
        state, num_trials = search(largest, first=first, fixed=800, tells=False)
        assert state.best >= 0.97 * largest
        assert num_trials <= 7, (largest, first)


def test_nothing_fits():
    """Zero, if not even a single sample fits."""
    state, _ = search(0, first=64)
    assert state.best == 0
    assert state.ceiling == 1


def test_a_line_that_was_refuted_is_not_followed():
    """Where memory runs out below what steps say they need, halving takes over."""
    state = BatchSearch(cap_bytes=10 * 70, first=4)
    while (size := state.next()) is not None:
        state.trials[size] = Trial(fits=size <= 40, need_bytes=10 * size if size <= 40 else None)
    assert state.best >= 39
    assert len(state.trials) <= 8
