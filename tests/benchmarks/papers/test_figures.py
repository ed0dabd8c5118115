"""A figure says how ours stands to the claim by one rule, and survives JSON."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.papers.figures import HEADER, Better, Figure, How, Unit, decode, encode

FIGURE = Figure(
    system="A", what="peak", setting="net, b=2", unit="bytes", claim=100.0, ours=150, better="less", how="layers"
)
BATCH = Figure(
    system="A", what="batch", setting="net", unit="count", claim=300, claim_baseline=100, ours=500, baseline=150,
    better="more", how="fake capture",
)  # fmt: skip


@pytest.mark.parametrize(
    ("ours", "better", "verdict"),
    [
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
    ],
)
def test_verdict(ours: float, better: Better, verdict: str) -> None:
    """More may be better, or less, or only the same."""
    assert dataclasses.replace(FIGURE, ours=ours, better=better).verdict == verdict


@pytest.mark.parametrize(
    ("ours", "baseline", "verdict"),
    [
        (500, 150, "beaten"),  # 3.33 times its baseline, where the paper has 3
        (500, 200, "not reached"),  # more, but 2.5 times what it was
        (290, 50, "not reached"),  # 5.8 times what it was, but less
        (450, 150, "matched"),
        (301, 60, "matched"),
    ],
)
def test_both_advantages_count(ours: int, baseline: int, verdict: str) -> None:
    """What is made of the own baseline counts as much as the figure itself."""
    assert dataclasses.replace(BATCH, ours=ours, baseline=baseline).verdict == verdict


@pytest.mark.parametrize(
    "change", [{"claim_baseline": None}, {"unknown": "its sizes"}, {"how": "simulation"}, {"baseline": None}]
)
def test_what_cannot_be_compared_is_never_beaten(change: dict[str, str | None]) -> None:
    """Without a baseline or a setting, or against a measurement, a better figure is no win; a worse one is worse."""
    changed = dataclasses.replace(BATCH, **change)  # type: ignore[arg-type]
    assert changed.verdict == "not comparable"
    assert dataclasses.replace(changed, ours=200).verdict == "not reached"


@given(
    st.sampled_from(["bytes", "count", "ratio", "share"]),
    st.sampled_from(["more", "less"]),
    st.sampled_from(["layers", "fake capture", "simulation"]),
    *(st.floats(0.01, 10) for _ in range(4)),
)
def test_a_win_is_better_in_every_way(
    unit: Unit, better: Better, how: How, claim: float, before: float, ours: float, plain: float
) -> None:
    """Whatever is called beaten is better by itself and over its baseline, and is not simulated."""
    figure = dataclasses.replace(
        FIGURE, unit=unit, better=better, how=how, claim=claim, claim_baseline=before, ours=ours, baseline=plain
    )
    if figure.verdict == "beaten":
        assert (ours > claim) == (better == "more")
        assert unit == "share" or (ours / plain > claim / before) == (better == "more")
        assert how != "simulation"


def test_shares_are_relative_already() -> None:
    """A share needs no baseline; it is shown with its sign."""
    share = dataclasses.replace(FIGURE, unit="share", claim=-0.35, ours=-0.4, how="fake capture")
    assert share.verdict == "beaten"
    assert share.cells()[3:5] == ("-35.0%", "-40.0%")
    assert dataclasses.replace(share, ours=-0.3).verdict == "not reached"


def test_cells_show_baselines_and_why_not() -> None:
    """A line has what each makes of its baseline, and the reason why two figures are not compared."""
    assert BATCH.cells()[3:6] == ("300 (3.00x of 100)", "500 (3.33x of 150)", "beaten")
    assert dataclasses.replace(BATCH, unknown="its sizes", note="slow").cells()[7] == "its sizes; slow"
    smaller = dataclasses.replace(FIGURE, ours=50 << 20, baseline=100 << 20, claim=80 << 20, claim_baseline=120 << 20)
    assert smaller.cells()[3:5] == ("80.00 MiB (1.50x below 120.00 MiB)", "50.00 MiB (2.00x below 100.00 MiB)")


def test_figure_without_a_claim() -> None:
    """There is nothing to compare with, and no row for it."""
    alone = dataclasses.replace(FIGURE, claim=None)
    assert (alone.verdict, [row.metric for row in alone.rows()]) == ("", ["ours_bytes"])


def test_rows_hold_claim_and_ours() -> None:
    """Both stand in the result's rows, under the case's name, in their unit."""
    rows = FIGURE.rows()
    assert [(row.case, row.metric, row.value) for row in rows] == [
        ("A: peak, net, b=2", "claimed_bytes", 100.0),
        ("A: peak, net, b=2", "ours_bytes", 150),
    ]


def test_round_trip_and_cells() -> None:
    """JSON gives the same figure back; a line has a cell for each name."""
    assert decode(json.loads(json.dumps(encode(BATCH)))) == BATCH
    assert len(FIGURE.cells()) == len(HEADER)
