"""The papers' networks have their published numbers of parameters, and a step of each can be recorded."""

from __future__ import annotations

import pytest
import torch

from benchmarks.papers import captures
from benchmarks.papers.networks import NETWORKS
from tests.shares import share

MILLIONS = {
    "inception-v3": 23.8,  # without the auxiliary classifier
    "inception-v4": 42.7,
    "resnet34": 21.8,
    "wrn-28-10": 36.5,
    "lstm-4": 66.4,  # 4 * (8 * 1024**2 + 8 * 1024) in the layers, 2 * 16,000 * 1024 around them
    "bert-base": 109.5,
}


def test_sizes(subtests: pytest.Subtests) -> None:
    """As published, to a tenth of a million."""
    for name, millions in MILLIONS.items():
        with subtests.test(name=name), torch.device("meta"):
            number = sum(parameter.numel() for parameter in NETWORKS[name].build().parameters())
            assert number / 1e6 == pytest.approx(millions, abs=0.06)


@pytest.mark.parametrize("name", share(list(MILLIONS), 2))
def test_steps(name: str) -> None:
    """A recorded step has forward and backward, and all parameters."""
    recorded = captures.record(NETWORKS[name], 2, captures.device("k40c"))
    assert recorded.parameter_bytes / 4e6 == pytest.approx(MILLIONS[name], abs=0.06)
    assert {op.phase for op in recorded.graph.ops} == {"forward", "backward"}
