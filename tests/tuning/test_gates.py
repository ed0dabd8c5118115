"""When what was found is set, as numbers."""

from __future__ import annotations

import pytest

from lightning_offload.tuning.gates import Choice, is_known_not_to_fit, sure_choice
from lightning_offload.tuning.search import SearchResult


def found(batch_size: int, confidence: float, smallest_failing: int | None = None) -> SearchResult:
    return SearchResult(
        batch_size=batch_size, confidence=confidence, trials=(), estimates=(), largest=batch_size,
        smallest_failing=smallest_failing, ended_by="trials",
    )  # fmt: skip


@pytest.mark.parametrize(("confidence", "size"), [(0.29, 16), (0.5, 1440), (0.9, 1440)])
def test_a_guess_is_not_set(confidence: float, size: int) -> None:
    """Below the wanted confidence the configured size stays, and it is said why."""
    choice = sure_choice(found(1440, confidence), base_size=16, min_confidence=0.5)
    assert choice.batch_size == size
    assert bool(choice.why_kept) == (size == 16)


def test_what_was_found_to_be_the_configured_size_needs_no_reason() -> None:
    """Nothing changes, so nothing is said."""
    assert sure_choice(found(16, 0.1), base_size=16, min_confidence=0.5) == Choice(batch_size=16)


def test_a_size_that_failed_is_not_kept() -> None:
    """Nor one above it."""
    unsure = found(8, 0.1, smallest_failing=12)
    assert [is_known_not_to_fit(size, unsure) for size in (11, 12, 16)] == [False, True, True]
    assert sure_choice(unsure, base_size=16, min_confidence=0.5).batch_size == 8
    assert sure_choice(unsure, base_size=11, min_confidence=0.5).batch_size == 11
