"""The tensor cache moves nothing while there is room, and what has to go when there is not."""

from __future__ import annotations

import pytest

from benchmarks.papers import cache, route
from benchmarks.papers.layers import Layer, Network, alexnet

GB = 10**9


def chain(num_layers: int, channels: int = 1) -> list[Layer]:
    net = Network(1, (channels, 256))
    for _ in range(num_layers):
        net.add("conv")
    return net.layers


def test_swapping_always_moves_each_convolution_twice() -> None:
    """AlexNet's convolutions have 650,080 outputs an image."""
    assert cache.swap_always_bytes(alexnet(1024)) == 2 * 4 * 650_080 * 1024


@pytest.mark.parametrize("batch_size", [256, 896, 1024])
def test_nothing_moves_on_the_gpu_of_the_paper(batch_size: int) -> None:
    """In the memory of a K40, less parameters, gradients, momentum and images, the cache holds all of AlexNet."""
    free = 11520 * (1 << 20) - 3 * 4 * 62_378_344 - batch_size * 3 * 227 * 227 * 4
    assert cache.cached_bytes(alexnet(batch_size), free) == 0


def test_least_recently_used_goes_first_and_comes_back() -> None:
    """Five equal tensors in room for four: the first output goes out once and comes back once."""
    size = chain(1)[0].num_bytes
    layers = chain(5)
    assert route.peak(layers, "liveness").num_bytes == 6 * size
    assert cache.cached_bytes(layers, 6 * size) == 0
    assert cache.cached_bytes(layers, 5 * size) == 2 * size
    assert cache.cached_bytes(layers, 4 * size) == 2 * 2 * size
