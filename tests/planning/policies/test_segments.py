"""Blocks by modules that repeat, equal parts elsewhere, and what is recomputed inside a segment."""

from __future__ import annotations

import pytest

from lightning_offload.planning.planner import plan
from lightning_offload.planning.policies.layers import Layers
from lightning_offload.planning.policies.segments import OUTSIDE, blocks, by_block, equal_parts, grouped, sqrt_size
from lightning_offload.planning.problem import Problem
from tests.graph.building import DEVICE
from tests.planning.policies.nets import Net, actions_of, conv_bn_relu, conv_relu


def _names(pattern: str, *counts: int) -> list[str]:
    names = [pattern]
    for i, count in enumerate(counts):
        names = [name.replace("XYZ"[i], str(n)) for name in names for n in range(count)]
    return names


def _all(*lists: list[str]) -> list[str]:
    return [name for names in lists for name in names]


GPT = _all(_names("transformer.h.X.attn.c_attn", 3), _names("transformer.h.X.mlp.act", 3), ["transformer.wte"])
RESNET = _all(_names("layerX.Y.conv1", 2, 2), _names("layerX.Y.bn1", 2, 2), ["layer1.0.downsample.0", "conv1", "fc"])
SWIN = _all(
    _names("layers.X.blocks.Y.attn.qkv", 2, 2), _names("layers.X.blocks.Y.mlp.fc1", 2, 2), ["layers.1.downsample.norm"]
)
T5 = _all(
    _names("encoder.block.X.layer.0.SelfAttention.q", 2), _names("encoder.block.X.layer.0.layer_norm", 2),
    _names("encoder.block.X.layer.1.DenseReluDense.wi", 2), _names("encoder.block.X.layer.1.layer_norm", 2),
)  # fmt: skip
MIXTRAL = _all(
    _names("model.layers.X.mlp.experts.Y.w1", 2, 4), _names("model.layers.X.mlp.experts.Y.w2", 2, 4),
    _names("model.layers.X.self_attn.q_proj", 2),
)  # fmt: skip
VIT = _all(_names("encoder.layers.encoder_layer_X.ln_1", 2), _names("encoder.layers.encoder_layer_X.mlp.0", 2))


@pytest.mark.parametrize(
    ("modules", "expected"),
    [
        (GPT, {"transformer.h.0", "transformer.h.1", "transformer.h.2"}),
        (RESNET, {"layer0.0", "layer0.1", "layer1.0", "layer1.1"}),
        (SWIN, {"layers.0.blocks.0", "layers.0.blocks.1", "layers.1.blocks.0", "layers.1.blocks.1"}),
        (T5, {"encoder.block.0", "encoder.block.1"}),
        (MIXTRAL, {"model.layers.0", "model.layers.1"}),
        (VIT, {"encoder.layers.encoder_layer_0", "encoder.layers.encoder_layer_1"}),
        (_names("features.X", 20), set()),
        (["backbone.conv", "backbone.bn", "0.conv", "0.bn", "1.linear", "1.act"], set()),
        (["", "rnn"], set()),
    ],
)
def test_blocks_of_known_architectures(modules: list[str], expected: set[str]) -> None:
    """Transformer layers, residual blocks and blocks of stages are found; experts, sublayers and lists are not."""
    assert set(blocks(modules).values()) == expected


def test_modules_outside_of_blocks_have_none() -> None:
    """Stems, heads and what lies between the blocks of a stage."""
    assert "fc" not in blocks(RESNET)
    assert "layers.1.downsample.norm" not in blocks(SWIN)
    assert blocks(RESNET)["layer1.0.downsample.0"] == "layer1.0"


def test_by_block_numbers_ops() -> None:
    """Each op of forward has the number of its block, in order; a network without blocks has none."""
    graph = conv_bn_relu(depth=3)
    assert by_block(Problem(graph)) == [0, 0, 0, 1, 1, 1, 2, 2, 2, 2, 2, 2, 1, 1, 1, 0, 0, 0]
    assert by_block(Problem(conv_relu())) is None


def test_grouped_makes_the_square_root(subtests: pytest.Subtests) -> None:
    """Successive segments are joined to about the square root of their number; ops outside stay outside."""
    for num, segments in [(2, 1), (3, 2), (4, 2), (9, 3), (12, 3), (16, 4), (48, 7)]:
        with subtests.test(num=num):
            found = grouped([OUTSIDE, *range(num)], sqrt_size(num))
            assert found[0] == OUTSIDE
            assert found[1:] == sorted(found[1:])
            assert len(set(found[1:])) == segments


def test_equal_parts_cut_where_least_crosses() -> None:
    """Sixteen layers make four parts; a narrow result near an even cut is where the cut goes."""
    net = Net()
    x = net.given(1)
    for i in range(16):
        x = net.layer("tanh", x, size=10 if i in (4, 7, 11) else 100, save="output")
    parts = equal_parts(Layers(Problem(net.finish())))[:16]
    # A cut before an op is crossed by the result before it; 4, 7 and 11 are narrow.
    assert parts == [0] * 5 + [1] * 3 + [2] * 4 + [3] * 4


def test_checkpoint_keeps_the_inputs_of_blocks() -> None:
    """Each block's own results are recomputed from the result of the block before it."""
    graph = conv_bn_relu(depth=4)
    assert actions_of(plan(graph, DEVICE, None, policy="checkpoint")) == {"swap": [], "recompute": [1, 3, 5, 7, 8]}


def test_checkpoint_sqrt_keeps_the_inputs_of_groups() -> None:
    """Of four blocks two make a segment: only the second group's input is kept."""
    graph = conv_bn_relu(depth=4)
    found = plan(graph, DEVICE, None, policy="checkpoint-sqrt")
    assert actions_of(found) == {"swap": [], "recompute": [1, 2, 3, 5, 6, 7, 8]}


def test_checkpoint_runs_each_op_at_most_once_more() -> None:
    """A replay memoises what the segment saved, so the step grows by what is recomputed, and by no op twice."""
    graph = conv_bn_relu(depth=4)
    found = plan(graph, DEVICE, None, policy="checkpoint")
    replayed = 4 * 8.0 + 4 * 1.0 + 1.0  # all convolutions, norms behind them for the ReLUs, the last ReLU
    assert 4 * 8.0 < found.predicted_step_seconds - found.plain_step_seconds <= replayed + 1.0


def test_without_blocks_forward_is_cut_into_parts() -> None:
    """Both policies: nine layers are three parts, whose inputs are kept."""
    graph = conv_relu(depth=9)
    for policy in ("checkpoint", "checkpoint-sqrt"):
        found = actions_of(plan(graph, DEVICE, None, policy=policy))
        kept = set(range(2, 20, 2)) - set(found["recompute"])
        assert len(kept) == 2


def test_what_cannot_be_replayed_is_kept() -> None:
    """An opaque result inside a block stays, and replays start from it."""
    net = Net()
    x = net.given(1)
    for i in range(3):
        x = net.layer("tanh", x, save="output", module=f"h.{i}.a")
        x = net.layer("custom", x, save="output", module=f"h.{i}.b", replayable=False)
        x = net.layer("gelu", x, save="output", module=f"h.{i}.c")
    found = actions_of(plan(net.finish(), DEVICE, None, policy="checkpoint"))
    assert not {2, 5, 8} & set(found["recompute"])
    assert {1, 9} <= set(found["recompute"])
