"""The order in which swaps leave for the disk; which ones do is tested by simulations."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lightning_offload.planning.kernels.tiers import sort

SECONDS = st.sampled_from([0.0, 1.0, 2.5])


@given(away=st.lists(SECONDS, max_size=40), data=st.data())
def test_the_longest_away_comes_first_then_the_lower_number(away: list[float], data: st.DataObject) -> None:
    """For any order before, and of part of a list alone."""
    storages = data.draw(st.permutations(range(len(away))))
    swapped = data.draw(st.permutations(range(len(away))))
    count = data.draw(st.integers(0, len(away)))
    found = list(swapped)
    sort(found, count, away, storages)
    assert found == [*sorted(swapped[:count], key=lambda s: (-away[s], storages[s])), *swapped[count:]]
