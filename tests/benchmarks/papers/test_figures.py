"""A figure says how ours stands to the claim by one rule, and survives JSON."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks.papers.figures import Figure

FIGURE = Figure(
    system="A", what="peak", setting="net, b=2", unit="bytes", claim=100.0, ours=150, better="less", how="layers"
)
BATCH = Figure(
    system="A", what="batch", setting="net", unit="count", claim=300, claim_baseline=100, ours=500, baseline=150,
    better="more", how="fake capture",
)  # fmt: skip


def test_verdict(subtests: pytest.Subtests) -> None:
    """More may be better, or less, or only the same."""
    for ours, better, verdict in [
        (100, "same", "matched"),
        (100.05, "same", "matched"),
        (100.2, "same", "not reached"),
        (100.5, "less", "matched"),
        (99.5, "less", "matched"),
        (150, "less", "not reached"),
        (50, "less", "beaten"),
        (150, "more", "beaten"),
        (50, "more", "not reached"),
        (0, "less", "beaten"),
        (0, "more", "not reached"),
    ]:
        with subtests.test(ours=ours):
            assert dataclasses.replace(FIGURE, ours=ours, better=better).verdict == verdict


def test_both_advantages_count(subtests: pytest.Subtests) -> None:
    """What is made of the own baseline counts as much as the figure itself."""
    for ours, baseline, verdict in [
        (500, 150, "beaten"),  # 3.33 times its baseline, where the paper has 3
        (500, 200, "not reached"),  # more, but 2.5 times what it was
        (290, 50, "not reached"),  # 5.8 times what it was, but less
        (450, 150, "matched"),
        (301, 60, "matched"),
    ]:
        with subtests.test(ours=ours):
            assert dataclasses.replace(BATCH, ours=ours, baseline=baseline).verdict == verdict


@pytest.mark.parametrize(
    "change", [{"claim_baseline": None}, {"unknown": "its sizes"}, {"how": "simulation"}, {"baseline": None}]
)
def test_what_cannot_be_compared_is_never_beaten(change: dict[str, str | None]) -> None:
    """Without a baseline or a setting, or against a measurement, a better figure is no win; a worse one is worse."""
    changed = dataclasses.replace(BATCH, **change)  # type: ignore[arg-type]
    assert changed.verdict == "not comparable"
    assert dataclasses.replace(changed, ours=200).verdict == "not reached"


def test_shares_are_relative_already() -> None:
    """A share needs no baseline; it is shown with its sign."""
    share = dataclasses.replace(FIGURE, unit="share", claim=-0.35, ours=-0.4, how="fake capture")
    assert share.verdict == "beaten"
    assert share.cells()[3:5] == ("-35.0%", "-40.0%")
    assert dataclasses.replace(share, ours=-0.3).verdict == "not reached"
