"""The heap of copies that may be waited for."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lightning_offload.planning.kernels.releases import pop, push


@given(items=st.lists(st.integers(0, 50)))
def test_heap_gives_the_least_item_first(items: list[int]) -> None:
    """Whatever the order in which they came."""
    heap, count, found = [0] * len(items), 0, []
    for item in items:
        count = push(heap, count, item)
    while count:
        found.append(heap[0])
        count = pop(heap, count)
    assert found == sorted(items)
