"""Figures that follow from the papers' rules on a network of layers: no capture, no GPU, exact to the byte."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.papers import cache, layrub, route
from benchmarks.papers.captures import device, memory_bytes
from benchmarks.papers.figures import Figure
from benchmarks.papers.layers import Layer, alexnet, resnet

_MIB = 1 << 20
_GB = 1e9
_ALEXNET_PARAMETERS = 62_378_344
_IMAGE_BYTES = 3 * 227 * 227 * 4
_RESNETS = {
    "ResNet-50": (3, 4, 6, 3),
    "ResNet-101": (3, 4, 23, 3),
    "ResNet-152": (3, 8, 36, 3),
    "ResNet-1001": (6, 32, 289, 6),
    "ResNet-1517": (6, 32, 461, 6),
}
_RECOMPUTATIONS: tuple[route.Recomputation, ...] = ("speed", "memory", "cost-aware")
_UNKNOWN_BATCH = (
    "the batch size of these figures is not known to us: of the powers of two 32 comes nearest, the peak is at the "
    "stem, and the rest of the paper's figure is no tensor of a layer there"
)


def superneurons_peaks() -> Iterator[Figure]:
    """AlexNet's peak under one technique on top of the other."""
    layers = alexnet(200)
    liveness, offloaded = route.peak(layers, "liveness"), route.peak(layers, "offload")
    recomputed = route.recompute(layers, "cost-aware").peak
    yield _peak("every tensor its own memory", 2189.437, route.baseline_bytes(layers), "")
    yield _peak("+ liveness", 1489.355, liveness.num_bytes, f"at the backward of {liveness.layer}, as in the paper")
    yield _peak(
        "+ offloaded CONV outputs",
        1132.155,
        offloaded.num_bytes,
        f"at the backward of {offloaded.layer}, as in the paper; the tensors that are there then add up to ours",
    )
    yield _peak(
        "+ recomputation", 886.23, recomputed.num_bytes, f"at the backward of {recomputed.layer}, as in the paper"
    )


def superneurons_extra_forwards() -> Iterator[Figure]:
    """Layers that run forward a second time, and the peak that is left."""
    claims = {
        "AlexNet": (alexnet(200), "b=200", ((14, 993.018), (23, 886.23), (17, 886.23)), ""),
        "ResNet-50": (resnet((3, 4, 6, 3), 32), "b=32", ((84, 455.125), (118, 401), (85, 401)), _UNKNOWN_BATCH),
        "ResNet-101": (resnet((3, 4, 23, 3), 32), "b=32", ((169, 455.125), (237, 401), (170, 401)), _UNKNOWN_BATCH),
    }
    for name, (layers, batch, figures, note) in claims.items():
        for how, (num_claimed, peak_claimed) in zip(_RECOMPUTATIONS, figures, strict=True):
            yield from _recomputed(layers, f"{name}, {batch}", how, num_claimed, peak_claimed, note)


def superneurons_cache() -> Iterator[Figure]:
    """Traffic of a step with and without the tensor cache."""
    capacity = memory_bytes(device("k40c")) - 3 * 4 * _ALEXNET_PARAMETERS
    with_cache = {size: _cached(size, capacity) for size in (896, 1024)}
    largest = 1024
    while _cached(largest + 32, capacity) == 0:
        largest += 32
    always = cache.swap_always_bytes(alexnet(1024))
    yield Figure(
        system="SuperNeurons", what="traffic of a step that swaps always", setting="AlexNet, b=1024", unit="bytes",
        claim=9.50 * _GB, ours=always, better="same", how="layers",
        unknown="what else the paper's runtime moves: all CONV outputs once out and once back weigh no more, and "
        "by the rules that are known nothing else moves",
    )  # fmt: skip
    yield Figure(
        system="SuperNeurons", what="traffic with the tensor cache", setting="AlexNet, b=896, K40c", unit="bytes",
        claim=0, ours=with_cache[896], better="same", how="layers",
    )  # fmt: skip
    yield Figure(
        system="SuperNeurons", what="traffic with the tensor cache", setting="AlexNet, b=1024, K40c", unit="bytes",
        claim=0.88 * _GB, ours=with_cache[1024], better="less", how="layers",
        unknown="the paper's convolutions take workspaces besides, whose sizes are not known",
        note=f"the cache moves nothing up to a batch of {largest} in {capacity / 2**30:.2f} GiB beside the parameters",
    )  # fmt: skip


def layrub_constant() -> Iterator[Figure]:
    """Intermediates on the device, whatever the depth."""
    for name, blocks in _RESNETS.items():
        total = layrub.all_bytes(blocks, 32) / 2**30
        yield Figure(
            system="Layrub", what="intermediates on the device", setting=f"{name}, b=32", unit="bytes",
            claim=759.5 * _MIB, ours=layrub.constant_bytes(blocks, 32), better="same", how="layers",
            note="by our reading of the rules all outputs of the first stage's first block; "
            f"{total:.1f} GiB over all blocks",
        )  # fmt: skip
    most = layrub.constant_bytes(_RESNETS["ResNet-1001"], 32) / layrub.all_bytes(_RESNETS["ResNet-1001"], 32) - 1
    yield Figure(
        system="Layrub", what="intermediates saved at most", setting="ResNet-1001, b=32", unit="share", claim=-0.989,
        ours=most, better="less", how="layers", note="of all blocks' outputs, as Caffe would have them",
    )  # fmt: skip


def _cached(batch_size: int, capacity_bytes: int) -> int:
    return cache.cached_bytes(alexnet(batch_size), capacity_bytes - batch_size * _IMAGE_BYTES)


def _peak(what: str, claim_mib: float, ours: int, note: str) -> Figure:
    return Figure(
        system="SuperNeurons", what=f"peak, {what}", setting="AlexNet, b=200", unit="bytes", claim=claim_mib * _MIB,
        ours=ours, better="same", how="layers", note=note,
    )  # fmt: skip


def _recomputed(
    layers: list[Layer], setting: str, how: route.Recomputation, num_claimed: int, peak_mib: float, unknown: str
) -> Iterator[Figure]:
    found = route.recompute(layers, how)
    yield Figure(
        system="SuperNeurons", what=f"extra forwards, {how}", setting=setting, unit="count", claim=num_claimed,
        ours=found.num_extra_forwards, better="same", how="layers",
    )  # fmt: skip
    yield Figure(
        system="SuperNeurons", what=f"peak, recomputing {how}", setting=setting, unit="bytes", claim=peak_mib * _MIB,
        ours=found.peak.num_bytes, better="same", how="layers", unknown=unknown,
    )  # fmt: skip
