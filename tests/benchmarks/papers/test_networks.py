"""The papers' networks have their published numbers of parameters, and a step of each can be recorded."""

from __future__ import annotations

import pytest

from benchmarks.papers import captures
from benchmarks.papers.networks import NETWORKS


def test_sizes(subtests: pytest.Subtests) -> None:
    """As published, to a tenth of a million; the step has forward and backward."""
    for name, millions in [
        ("inception-v3", 23.8),  # without the auxiliary classifier
        ("inception-v4", 42.7),
        ("resnet34", 21.8),
        ("wrn-28-10", 36.5),
        ("bert-base", 109.5),
        ("lstm-4", 66.4),  # 4 * (8 * 1024**2 + 8 * 1024) in the layers, 2 * 16,000 * 1024 around them
    ]:
        with subtests.test(name=name):
            spec = captures.device("k40c")
            recorded = captures.record(NETWORKS[name], 2, spec)
            assert recorded.parameter_bytes / 4e6 == pytest.approx(millions, abs=0.06)
            assert {op.phase for op in recorded.graph.ops} == {"forward", "backward"}
