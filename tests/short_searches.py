"""A fixture for trainings that need plans within the budget, and not the fastest: searches take moments.

How good plans are is judged by `tests/planning`. A module that judges them itself has a fixture of this name that does
nothing; where nothing is left out (:mod:`tests.shares`), all search as users do.
"""

from __future__ import annotations

import pytest

from lightning_offload.planning import auto
from tests.shares import is_all


@pytest.fixture(autouse=True)
def short_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few orders, one short round of local search, and no policy of others."""
    if is_all():
        return
    monkeypatch.setattr(auto, "_MANY_ROWS", 0)
    monkeypatch.setattr(auto, "_ROUNDS", ((1.01, 4),))
    monkeypatch.setattr(auto, "_MOST_ANEW", 0)
    monkeypatch.setattr(auto, "_MIN_TRIALS", 64)
    monkeypatch.setattr(auto, "PUBLISHED", {})
