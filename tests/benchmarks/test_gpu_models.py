"""The models of the GPU suite: published sizes, and checkpointing that changes nothing."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

from benchmarks.checkpoints import BlockCheckpoints
from benchmarks.gpu.models import blocks_of, workload
from tests.zoo.models.plain_conv import VGG

CPU, META = torch.device("cpu"), torch.device("meta")
NAMES = ("resnet50", "resnet152", "vgg19", "gpt2-medium", "bert-large", "vit-large")


@pytest.mark.parametrize(
    ("name", "num_parameters", "num_blocks"),
    [
        ("resnet50", 25_557_032, 16),
        ("resnet152", 60_192_808, 50),
        ("vgg19", 143_667_240, 5),
        ("gpt2-medium", 354_823_168, 24),
        ("bert-large", 335_174_458, 24),
        ("vit-large", 304_326_632, 24),
    ],
)
def test_sizes_are_the_published_ones(name: str, num_parameters: int, num_blocks: int):
    """As many parameters and blocks as in the papers."""
    trained = workload(name, META, quick=False)
    assert sum(parameter.numel() for parameter in trained.model.parameters()) == num_parameters
    assert len(blocks_of(trained.model)) == num_blocks
    assert trained.model.training


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", NAMES)
def test_checkpointed_blocks_give_the_same_gradients(name: str, precision: str):
    """While it is on the blocks are computed again in backward; switched off again, nothing is left of it."""
    trained = workload(name, CPU, quick=True, precision=precision)
    blocks = blocks_of(trained.model)
    layers = [next(part for part in block.modules() if not list(part.children())) for block in blocks]
    calls: list[nn.Module] = []
    for layer in layers:
        layer.register_forward_hook(lambda layer, args, out: calls.append(layer))
    gradients, num_calls = [], []
    checkpoints = None
    for mode in ("untouched", "off", "on", "off"):
        if mode == "off":
            checkpoints = checkpoints or BlockCheckpoints(blocks)
        torch.manual_seed(5)
        calls.clear()
        trained.step(checkpoints.on if checkpoints is not None and mode == "on" else contextlib.nullcontext)
        gradients.append([weight.grad.clone() for weight in trained.model.parameters() if weight.grad is not None])
        num_calls.append(len(calls))
    assert num_calls == [len(blocks), len(blocks), 2 * len(blocks), len(blocks)]
    for other in gradients[1:]:
        assert all(torch.equal(a, b) for a, b in zip(gradients[0], other, strict=True))


def test_grouped_vgg_computes_the_same():
    """Its stages are the layers of the flat network, in their order."""
    trained = workload("vgg19", CPU, quick=True)
    torch.manual_seed(0)
    flat = VGG((1, 1, 2), width=16, hidden=64, grid=2)
    kinds = [type(layer) for stage in blocks_of(trained.model) for layer in stage]
    assert kinds == [type(layer) for layer in flat.features]


def test_batch_size_can_be_chosen():
    """The search for the largest batch sets it."""
    trained = workload("resnet50", CPU, quick=True, batch_size=3)
    assert trained.config["batch_size"] == len(trained.batch[0]) == 3


def test_unknown_model_is_refused():
    """The error lists the models."""
    with pytest.raises(ValueError, match="unknown 'lenet' or 'fp32'; there are resnet50"):
        workload("lenet", CPU, quick=True)
