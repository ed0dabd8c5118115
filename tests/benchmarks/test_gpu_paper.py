"""The papers' settings on the CPU, tiny: caps hold, ways are compared with plain training, errors are notes."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from benchmarks.gpu import paper
from benchmarks.results import Measurements

CPU = torch.device("cpu")


def figures(found: Measurements) -> dict[str, Mapping[str, float]]:
    """The figures of each way."""
    ways: dict[str, dict[str, float]] = {}
    for row in found.rows:
        ways.setdefault(row.case, {})[row.metric] = row.value
    return ways


def test_ways_within_a_cap_train_as_plainly():
    """The cap is tight for plain training; a way that fits has its bits, its peak below the cap, and figures."""
    found = paper.within_cap(
        CPU, quick=True, title="x", network="resnet152", batch_size=140, policies=["auto", "checkpoint"], cap_bytes=1
    )
    reference, plain, auto, checkpoint = figures(found).values()
    cap_bytes = found.config["cap_bytes"]
    assert reference["fits"] == 1
    assert reference["peak_bytes"] > cap_bytes
    assert plain == {"fits": 0}
    assert auto["fits"] == auto["same_bits"] == auto["is_planned"] == 1
    assert auto["peak_bytes"] <= auto["budget_bytes"] <= cap_bytes
    assert auto["ratio"] > 0
    for name, way in figures(found).items():
        assert (name in found.notes) == (way["fits"] == 0)
    assert checkpoint["fits"] == 0 or checkpoint["same_bits"] == 1


def test_a_cap_may_be_a_share_of_the_plain_peak(monkeypatch: pytest.MonkeyPatch):
    """Then the plain peak is measured first."""
    tiny = paper.example_of("seq2seq-400", quick=True)
    monkeypatch.setattr(paper, "example_of", lambda name, quick: tiny)
    found = paper.within_cap(CPU, quick=False, title="x", network="vgg19", batch_size=4, policies=[], cap_share=0.65)
    reference, plain = figures(found).values()
    assert found.config["cap_bytes"] == round(0.65 * reference["peak_bytes"])
    assert plain["fits"] == 0
    with pytest.raises(ValueError, match="neither"):
        paper.within_cap(CPU, quick=False, title="x", network="vgg19", batch_size=4, policies=[])


def test_depths_are_tried_within_a_cap():
    """One that fits has figures; others say what they need, or why they do not fit."""
    small = paper.depth(CPU, quick=True, cap_bytes=64 << 20, batch_size=16, is_managed=True, depth=4)
    assert small["fits"]
    assert small["need_bytes"] == small["figures"]["floor_bytes"]
    assert small["figures"]["is_planned"] == 1
    tight = paper.depth(CPU, quick=True, cap_bytes=1 << 20, batch_size=16, is_managed=True, depth=4)
    assert not tight["fits"]
    assert tight["need_bytes"] > 1 << 20
    plain = paper.depth(CPU, quick=True, cap_bytes=1 << 20, batch_size=16, is_managed=False, depth=4)
    assert not plain["fits"]
    assert plain["reason"]
