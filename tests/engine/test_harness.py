"""The harness accepts a faithful plugin, and sees a wrong one."""

from __future__ import annotations

import pytest
import torch

from tests.engine.fakes import CopyingMemory
from tests.engine.harness import Outcome, Wrap, assert_same, differences, run, snapshot
from tests.zoo.cases import BY_NAME


@pytest.mark.parametrize("wrap", list(Wrap), ids=lambda wrap: wrap.value)
@pytest.mark.parametrize("name", ["gpt2-sdpa", "lstm", "retain-graph", "autograd-grad", "gan", "accumulation"])
def test_a_faithful_plugin_passes(name: str, wrap: Wrap) -> None:
    """Copies of saved tensors give the same bits, and the plugin is in force where the wrap says."""
    case = BY_NAME[name]
    memory = CopyingMemory()
    assert_same(run(case), run(case, memory=memory, wrap=wrap))
    assert memory.num_packed > 0
    assert memory.num_unpacked > 0
    assert (memory.num_backwards > 0) == (wrap is Wrap.FORWARD)


def test_a_slightly_wrong_plugin_is_seen() -> None:
    """A relative error of one bit in what is read back shows in the first gradients, under their names."""
    case = BY_NAME["custom-function"]
    found = differences(run(case), run(case, memory=CopyingMemory(error=1e-6)))
    assert "step0/grad/layers.0.weight" in found[0]
    assert "elements" in found[0]
    assert found[-1].startswith("... and ")


def test_a_write_after_pack_is_seen() -> None:
    """Copies taken at pack miss a later write through `.data`, which plain backward reads."""
    case = BY_NAME["data-after-pack"]
    with pytest.raises(AssertionError, match="step0/grad"):
        assert_same(run(case), run(case, memory=CopyingMemory()))


def test_snapshots_compare_bits_and_geometry() -> None:
    """NaN equals NaN; 0 and -0, a dtype, a shape or a stride differ."""
    nan = torch.full((2, 3), float("nan"))
    assert snapshot(nan) == snapshot(nan.clone())
    zero = torch.zeros(2, 3)
    others = [-zero, zero.double(), zero.view(3, 2), zero.t().contiguous().t()]
    assert all(snapshot(zero) != snapshot(other) for other in others)
    value = torch.tensor([1 + 2j, 3 - 4j])
    assert snapshot(value.conj()) == snapshot(torch.tensor([1 - 2j, 3 + 4j]))


def test_differences_name_what_is_missing() -> None:
    """A name in one outcome alone is a difference."""
    expected, actual = Outcome(), Outcome()
    expected.add("loss", torch.ones(1))
    actual.add("other", 3)
    assert differences(expected, actual) == [
        "loss: only in the expected outcome",
        "other: only in the actual outcome",
    ]
