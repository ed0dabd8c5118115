"""What a mean step takes where the lengths of batches vary, priced by what is planned."""

from __future__ import annotations

import pytest

from lightning_offload.callbacks.tuning.lengths import Lengths


def test_shares_are_of_the_longest_and_ascend() -> None:
    """Of many lengths 32 quantiles are kept."""
    assert Lengths.of([30, 60, 15], 4).shares == (0.25, 0.5, 1.0)
    many = Lengths.of(list(range(1, 1001)), 4).shares
    assert len(many) == 32
    assert list(many) == sorted(many)
    assert sum(many) / 32 == pytest.approx(0.5, abs=0.02)


def test_a_mean_step_is_that_of_the_mean_length_where_seconds_are_in_proportion() -> None:
    """Without fixed seconds the share is the mean of the lengths; with them shorter batches gain less."""
    lengths = Lengths.of([10, 20, 40, 40], 16)
    assert lengths.typical_share(16, lambda size: float(size)) == pytest.approx(0.6875, abs=0.001)
    share = lengths.typical_share(16, lambda size: 16.0 + size)
    assert share == pytest.approx((16 + 16 * 0.6875) / 32, abs=0.001)


def test_larger_batches_are_padded_to_the_longest_of_more_samples() -> None:
    """Twice the size is the longer one of two; half the size is shorter."""
    lengths = Lengths.of([10, 40], 8)
    assert lengths.weights(8) == [0.5, 0.5]
    assert lengths.weights(16) == [0.25, 0.75]
    assert lengths.weights(4) == pytest.approx([0.5**0.5, 1 - 0.5**0.5])
    shares = [lengths.typical_share(size, lambda size: float(size)) for size in (4, 8, 16, 64)]
    assert all(share is not None for share in shares)
    assert shares == sorted(shares)  # type: ignore[type-var]
    assert shares[1] == pytest.approx(0.625)
    assert shares[3] == pytest.approx(1.0, abs=0.01)


def test_few_sizes_are_priced() -> None:
    """Powers of two and the size itself, however many lengths there are; in between lie straight lines."""
    asked = []

    def seconds(size: int) -> float:
        asked.append(size)
        return float(size)

    assert Lengths.of(list(range(1, 200)), 8).typical_share(100, seconds) is not None
    assert sorted(asked) == [1, 2, 4, 8, 16, 32, 64, 100]


def test_what_cannot_be_planned_is_not_told() -> None:
    """Neither a size that does not fit, nor one of which nothing is predicted."""
    lengths = Lengths.of([10, 40], 8)
    assert lengths.typical_share(8, lambda size: None) is None
    assert lengths.typical_share(8, lambda size: 1.0 if size < 8 else None) is None
    assert lengths.typical_share(8, lambda size: 1.0 if size == 8 else None) is None
    assert lengths.typical_share(1, lambda size: 2.0) == 1.0
