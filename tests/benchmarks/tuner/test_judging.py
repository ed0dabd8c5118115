"""Which choices are right on a curve."""

from __future__ import annotations

import pytest

from benchmarks.tuner.judging import judge

SATURATING = {n: n / (n + 10) for n in (10, 50, 100, 150, 200, 400)}


def test_a_choice_may_be_five_percent_below_the_best() -> None:
    """At a tolerance of 3% the limit is 95% of the fastest, that included."""
    assert judge(8, {8: 95.0, 10: 100.0}, 0.03).is_right
    assert not judge(8, {8: 94.9, 10: 100.0}, 0.03).is_right


def test_a_choice_is_wrong_where_a_much_smaller_one_does_as_well() -> None:
    """Below three quarters of the choice nothing may reach 98.5% of the fastest."""
    assert not judge(100, {74: 98.5, 100: 100.0}, 0.03).is_right
    assert judge(100, {74: 98.4, 100: 100.0}, 0.03).is_right
    assert judge(100, {75: 100.0, 100: 100.0}, 0.03).is_right


def test_a_verdict_names_the_sizes() -> None:
    """The fastest, the fastest of the much smaller ones, and by how much they differ."""
    verdict = judge(200, SATURATING, 0.03)
    assert (verdict.best_size, verdict.smaller_size) == (400, 100)
    assert verdict.best_over_chosen == pytest.approx((400 / 410) / (200 / 210))
    assert verdict.smaller_over_best == pytest.approx((100 / 110) / (400 / 410))
    assert verdict.is_right
    least = judge(10, {10: 100.0, 20: 101.0}, 0.03)  # nothing is much smaller: only the speed counts
    assert (least.smaller_size, least.smaller_over_best, least.is_right) == (None, None, True)
    assert judge(16, {16: 5.0, 8: 5.0}, 0.03).best_size == 8
