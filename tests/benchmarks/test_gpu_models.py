"""The models of the GPU suite have the published sizes."""

from __future__ import annotations

import torch

from benchmarks.checkpoints import blocks_of
from benchmarks.gpu.models import workload


def test_sizes_are_the_published_ones():
    """As many parameters and blocks as in the papers."""
    published = {
        "resnet50": (25_557_032, 16), "resnet152": (60_192_808, 50), "vgg19": (143_667_240, 5),
        "gpt2-medium": (354_823_168, 24), "bert-large": (335_174_458, 24), "vit-large": (304_326_632, 24),
    }  # fmt: skip
    for name, (num_parameters, num_blocks) in published.items():
        model = workload(name, torch.device("meta"), quick=False).model
        assert sum(parameter.numel() for parameter in model.parameters()) == num_parameters, name
        assert len(blocks_of(model)) == num_blocks, name
        assert model.training, name
