"""Curves and lanes with fewer points, and no peak lost."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_offload.planning.trace import Span
from lightning_offload.report.thinning import merge_spans, thin_curve


def span(start: float, end: float, *, name: str = "a", num_bytes: int = 0, module: str = "") -> Span:
    return Span(
        lane="compute", kind="op", start_seconds=start, end_seconds=end, name=name, module=module, phase="forward",
        tick=0, num_bytes=num_bytes,
    )  # fmt: skip


def test_repeated_values_go_first() -> None:
    """A short curve keeps each change, and its end."""
    values = np.array([5, 5, 7, 7, 7, 5, 5])
    assert thin_curve(np.arange(7.0), values, 100) == [0, 2, 5, 6]


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=300), st.integers(1, 20))
def test_thin_curve_keeps_its_extremes(values: list[int], num_bins: int) -> None:
    """At most four points a bin, in order, with the first, the last, the lowest and the highest value."""
    chosen = thin_curve(np.arange(float(len(values))), np.array(values), num_bins)
    assert chosen == sorted(set(chosen))
    assert len(chosen) <= 4 * num_bins + 1
    assert {chosen[0], chosen[-1]} == {0, len(values) - 1}
    shown = [values[i] for i in chosen]
    assert (max(shown), min(shown)) == (max(values), min(values))


def test_curve_without_duration_is_thinned_too() -> None:
    """A step whose ops take no time."""
    assert thin_curve(np.zeros(4), np.array([1, 2, 3, 3]), 1) == [0, 1, 2, 3]


def test_short_neighbours_are_merged() -> None:
    """With their sum of time and bytes, the first and the last of them, and the op that takes longest."""
    spans = [
        span(0.0, 0.1, num_bytes=3, module="m"), span(0.1, 0.3, name="b", num_bytes=4), span(0.3, 0.35, module="n"),
        span(5.0, 8.0), span(8.0, 8.1),
    ]  # fmt: skip
    blocks = merge_spans(spans, 1.0)
    assert [(b.start_seconds, b.end_seconds, b.num_spans) for b in blocks] == [(0, 0.35, 3), (5, 8, 1), (8, 8.1, 1)]
    assert (blocks[0].num_bytes, blocks[0].name) == (7, "b")
    assert (blocks[0].first.module, blocks[0].last.module) == ("m", "n")
    assert blocks[0].busy_seconds == pytest.approx(0.35)


def test_long_spans_stay_alone() -> None:
    """What can be seen on its own is."""
    assert [b.num_spans for b in merge_spans([span(0, 2), span(2, 4), span(4, 6)], 1.0)] == [1, 1, 1]


@given(st.lists(st.tuples(st.floats(0, 0.5), st.floats(0, 0.5)), max_size=200))
def test_number_of_blocks_is_bounded(steps: list[tuple[float, float]]) -> None:
    """Two for each stretch of time that can be seen, and every span is in one of them."""
    spans, now = [], 0.0
    for gap, length in steps:
        spans.append(span(now + gap, now + gap + length))
        now += gap + length
    blocks = merge_spans(spans, 0.25)
    assert sum(block.num_spans for block in blocks) == len(spans)
    assert len(blocks) <= 2 * (now / 0.25) + 2
    for one, two in itertools.pairwise(blocks):
        assert one.end_seconds <= two.start_seconds + 1e-9
