"""The demo's network is the published ResNet-50."""

from __future__ import annotations

import torch

from examples.demo.resnet import NUM_PARAMETERS_1000_CLASSES, Bottleneck, ResNet50, count_parameters


def test_parameter_count_is_the_published_one():
    """With 1000 classes there are exactly 25,557,032 parameters in 16 blocks."""
    with torch.device("meta"):
        network = ResNet50(num_classes=1000)
    assert count_parameters(network) == NUM_PARAMETERS_1000_CLASSES == 25_557_032
    assert sum(isinstance(module, Bottleneck) for module in network.modules()) == 16


def test_logits_have_one_column_per_class():
    """A batch of images gives a row of logits for each image."""
    network = ResNet50(num_classes=10, width=4, blocks=(1, 2))
    assert network(torch.randn(3, 3, 32, 32)).shape == (3, 10)


def test_resolution_halves_at_each_stage_but_the_first():
    """The stem divides by four, every later stage by two."""
    network = ResNet50(num_classes=10, width=4)
    assert network.stages(torch.randn(1, 4, 16, 16)).shape == (1, 4 * 8 * 4, 2, 2)
