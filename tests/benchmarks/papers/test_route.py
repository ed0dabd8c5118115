"""SuperNeurons' figures, counted on networks of layers, are the paper's."""

from __future__ import annotations

import pytest

from benchmarks.papers import route
from benchmarks.papers.layers import alexnet, resnet

MIB = 1 << 20
RESNET50 = (3, 4, 6, 3)
RESNET101 = (3, 4, 23, 3)


def mib(num_bytes: int) -> float:
    return round(num_bytes / MIB, 3)


def test_alexnet_has_the_tensors_of_the_paper() -> None:
    """23 outputs and 13 gradients that are not made in place: 36 tensors of 2189.437 MiB at a batch of 200."""
    layers = alexnet(200)
    assert len(layers) == 23
    assert route.num_tensors(layers) == 36
    assert mib(route.baseline_bytes(layers)) == 2189.437


def test_each_technique_lowers_the_peak_as_published() -> None:
    """Liveness, offloading and recomputation leave the paper's peaks, at the layers that it names."""
    layers = alexnet(200)
    liveness, offload = route.peak(layers, "liveness"), route.peak(layers, "offload")
    recomputed = route.recompute(layers, "cost-aware").peak
    assert (mib(liveness.num_bytes), liveness.layer) == (1489.355, "POOL5")
    assert (mib(offload.num_bytes), offload.layer) == (1132.056, "POOL2")
    assert (round(recomputed.num_bytes / MIB, 2), recomputed.layer) == (886.23, "LRN1")


@pytest.mark.parametrize(
    ("how", "num_extra", "peak_mib"), [("speed", 14, 993.018), ("memory", 23, 886.23), ("cost-aware", 17, 886.23)]
)
def test_extra_forwards_of_alexnet(how: route.Recomputation, num_extra: int, peak_mib: float) -> None:
    """The three ways to recompute cost and leave what the paper says."""
    found = route.recompute(alexnet(200), how)
    assert found.num_extra_forwards == num_extra
    assert mib(found.peak.num_bytes) == pytest.approx(peak_mib, abs=0.001)


@pytest.mark.parametrize(
    ("blocks", "num_extra"),
    [
        (RESNET50, {"speed": 84, "memory": 118, "cost-aware": 85}),
        (RESNET101, {"speed": 169, "memory": 237, "cost-aware": 170}),
    ],
)
def test_extra_forwards_of_residual_networks(blocks: tuple[int, int, int, int], num_extra: dict[str, int]) -> None:
    """Counts do not hang on the batch; the peak under cost-aware recomputation is that of the memory-centric one."""
    for batch_size in (1, 32):
        layers = resnet(blocks, batch_size)
        found = {how: route.recompute(layers, how) for how in ("speed", "memory", "cost-aware")}  # type: ignore[arg-type]
        assert {how: each.num_extra_forwards for how, each in found.items()} == num_extra
        assert found["cost-aware"].peak == found["memory"].peak
        assert found["memory"].peak.num_bytes < found["speed"].peak.num_bytes
