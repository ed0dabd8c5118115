"""Peaks and extra forwards of SuperNeurons' techniques, one on top of the other, on a network of layers.

Backward goes over the layers from the last to the first. When it reaches a layer there are on the device: outputs of
forward that it or an earlier layer still needs, the gradient of its output and that of its input, and gradients that
a shortcut has handed on and that wait for their fork. What is counted of the outputs depends on the technique:

* baseline: every tensor of the step has memory of its own;
* liveness: an output goes with its last use;
* offload: an output of a CONV is on the host, save that of the nearest CONV at or before the layer;
* recompute: outputs between two checkpoints are dropped in forward. `speed` brings a segment back at once, `memory`
  makes what one layer's backward needs and drops the rest again; `cost-aware` does the former wherever that stays
  below the largest need of any one layer.

The peak of recomputation counts checkpoints other than those CONV outputs as offloaded, too: in a residual network
joins would add up with its depth otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from benchmarks.papers.layers import DATA, Layer

Technique = Literal["liveness", "offload"]
Recomputation = Literal["speed", "memory", "cost-aware"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The most bytes at once, and the layer whose backward has them."""

    num_bytes: int
    layer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Recomputed:
    """What recomputation costs and leaves."""

    num_extra_forwards: int
    peak: Peak


def baseline_bytes(layers: Sequence[Layer]) -> int:
    """Return the bytes of all outputs and gradients."""
    return sum(layer.num_bytes + layer.gradient_bytes for layer in layers)


def num_tensors(layers: Sequence[Layer]) -> int:
    """Return how many tensors that are."""
    return sum(1 + (layer.gradient_bytes > 0) for layer in layers)


def peak(layers: Sequence[Layer], technique: Technique) -> Peak:
    """Return the peak of backward without recomputation."""
    return max(
        (
            Peak(num_bytes=_outputs(layers, index, technique) + _gradients(layers, index), layer=layers[index].name)
            for index in range(len(layers))
        ),
        key=lambda found: found.num_bytes,
    )


def recompute(layers: Sequence[Layer], how: Recomputation) -> Recomputed:
    """Return extra forwards and peak of recomputation on top of offloading."""
    segments = _segments(layers)
    limit = max(_layer_bytes(layers, index) for index in range(len(layers)))
    per_segment = {}
    for segment in segments:
        fits = max(_segment_peak(layers, index, segment) for index in _readers(layers, segment)) <= limit
        is_fast = how == "speed" or (how == "cost-aware" and fits)
        per_segment[segment[0]] = _at_once(layers, segment) if is_fast else _one_by_one(layers, segment)
    num_extra = sum(found.num_extra_forwards for found in per_segment.values())
    peaks = [found.peak for found in per_segment.values()]
    rest = [Peak(num_bytes=_layer_bytes(layers, i), layer=layer.name) for i, layer in enumerate(layers)]
    return Recomputed(num_extra_forwards=num_extra, peak=max(peaks + rest, key=lambda found: found.num_bytes))


def needs(layers: Sequence[Layer], index: int) -> set[int]:
    """Return the layers whose outputs the backward of a layer reads."""
    layer = layers[index]
    read = set(layer.inputs) - {DATA} if layer.reads_input else set()
    return read | ({index} if layer.reads_output else set())


def _outputs(layers: Sequence[Layer], index: int, technique: Technique) -> int:
    """Bytes of the outputs that are there when backward reaches a layer: what it and earlier ones read."""
    alive = {i for earlier in range(index + 1) for i in needs(layers, earlier)}
    if technique == "offload":
        nearest = _nearest_conv(layers, index)
        alive = {i for i in alive if layers[i].kind != "conv" or i == nearest}
    return sum(layers[i].num_bytes for i in alive)


def _nearest_conv(layers: Sequence[Layer], index: int) -> int:
    return max((i for i in range(index + 1) if layers[i].kind == "conv"), default=-1)


def _gradients(layers: Sequence[Layer], index: int) -> int:
    """Bytes of the gradients of a layer's output and input; one tensor if in place."""
    layer = layers[index]
    return layer.num_bytes + layer.gradient_bytes


def _layer_bytes(layers: Sequence[Layer], index: int) -> int:
    """What one layer's backward needs, with the CONV output that is there for it or being brought back."""
    there = needs(layers, index)
    nearest = _nearest_conv(layers, index)
    there |= {nearest} if nearest >= 0 else set()
    return sum(layers[i].num_bytes for i in there) + _gradients(layers, index)


def _segments(layers: Sequence[Layer]) -> list[list[int]]:
    """Runs of layers that are no checkpoints and that some backward needs."""
    needed = {i for index in range(len(layers)) for i in needs(layers, index)}
    segments: list[list[int]] = []
    for index, layer in enumerate(layers):
        if layer.is_checkpoint:
            continue
        if segments and segments[-1][-1] == index - 1:
            segments[-1].append(index)
        else:
            segments.append([index])
    kept = [[i for i in segment if any(j in needed for j in segment[segment.index(i) :])] for segment in segments]
    return [segment for segment in kept if segment]


def _readers(layers: Sequence[Layer], segment: Sequence[int]) -> list[int]:
    """The layers whose backward reads a segment's outputs or is within it, last first."""
    inside = set(segment)
    return [i for i in range(len(layers) - 1, -1, -1) if i in inside or needs(layers, i) & inside]


def _segment_peak(layers: Sequence[Layer], index: int, segment: Sequence[int]) -> int:
    """Bytes at the backward of a layer with all of the segment up to there, and the CONV before it."""
    there = {i for i in segment if i <= index} | needs(layers, index)
    nearest = _nearest_conv(layers, index)
    there |= {nearest} if nearest >= 0 else set()
    return sum(layers[i].num_bytes for i in there) + _gradients(layers, index)


def _at_once(layers: Sequence[Layer], segment: Sequence[int]) -> Recomputed:
    peaks = [
        Peak(num_bytes=_segment_peak(layers, index, segment), layer=layers[index].name)
        for index in _readers(layers, segment)
    ]
    return Recomputed(num_extra_forwards=len(segment), peak=max(peaks, key=lambda found: found.num_bytes))


def _one_by_one(layers: Sequence[Layer], segment: Sequence[int]) -> Recomputed:
    """Each backward makes what it lacks, from the checkpoint on, and keeps only what it reads."""
    num_extra, there, peaks = 0, set[int](), []
    for index in _readers(layers, segment):
        wanted = needs(layers, index) & set(segment)
        if not wanted <= there:
            num_extra += sum(1 for i in segment if i <= max(wanted - there))
        there = wanted
        peaks.append(Peak(num_bytes=_layer_bytes(layers, index), layer=layers[index].name))
    return Recomputed(num_extra_forwards=num_extra, peak=max(peaks, key=lambda found: found.num_bytes))
