"""A figure says how ours stands to the claim, and survives JSON."""

from __future__ import annotations

import dataclasses
import json

import pytest

from benchmarks.papers.figures import HEADER, Better, Figure, decode, encode

FIGURE = Figure(
    system="A", what="peak", setting="net, b=2", unit="bytes", claim=100.0, ours=150, better="less", how="layers"
)


@pytest.mark.parametrize(
    ("ours", "better", "verdict"),
    [
        (100, "same", "the same"),
        (100.05, "less", "the same"),
        (150, "same", "differs, +50.0%"),
        (150, "less", "not reached, +50.0%"),
        (50, "less", "beaten, -50.0%"),
        (150, "more", "beaten, +50.0%"),
        (50, "more", "not reached, -50.0%"),
    ],
)
def test_verdict(ours: float, better: Better, verdict: str) -> None:
    """More may be better, or less, or only the same."""
    assert dataclasses.replace(FIGURE, ours=ours, better=better).verdict == verdict


def test_shares_differ_by_points() -> None:
    """A share is compared by points, and shown with its sign."""
    share = dataclasses.replace(FIGURE, unit="share", claim=0.18, ours=0.05)
    assert share.verdict == "beaten, -13.0 points"
    assert share.cells()[3:5] == ("+18.0%", "+5.0%")


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
    assert decode(json.loads(json.dumps(encode(FIGURE)))) == FIGURE
    assert len(FIGURE.cells()) == len(HEADER)
