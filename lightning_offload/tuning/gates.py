"""Whether what a search found is set, or what the user configured stays: a tuner must not make a run worse.

Pure functions over numbers. A configured size that does not fit cannot stay, whatever the gates say.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_offload.tuning.search import SearchResult

__all__ = ["Choice", "is_known_not_to_fit", "sure_choice"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The size that is set.

    Attributes:
        batch_size: Samples of one step on one rank.
        why_kept: Why it is the configured one and not what was found; empty where it is what was found.
    """

    batch_size: int
    why_kept: str = ""


def is_known_not_to_fit(batch_size: int, found: SearchResult) -> bool:
    """Whether trials say that a size is too large."""
    return found.smallest_failing is not None and batch_size >= found.smallest_failing


def sure_choice(found: SearchResult, *, base_size: int, min_confidence: float) -> Choice:
    """Choose what was found where the search is sure enough of it, and otherwise the configured size.

    Args:
        found: By the search.
        base_size: The configured size.
        min_confidence: Probability from 0 to 1 that the found size is right, below which nothing changes.
    """
    if found.batch_size == base_size or found.confidence >= min_confidence or is_known_not_to_fit(base_size, found):
        return Choice(batch_size=found.batch_size)
    return Choice(
        batch_size=base_size,
        why_kept=f"The configured {base_size} is kept: the search is only {found.confidence:.0%} sure of"
        f" {found.batch_size} (min_confidence={min_confidence:g})",
    )
