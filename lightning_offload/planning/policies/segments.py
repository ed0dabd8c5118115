"""Cuts forward into segments to be checkpointed: by the network's own blocks, or into equal parts.

A *block* is a module that repeats: one of several numbered children of a container, with modules of its own, that are
those of another one (``layer3.4``, ``transformer.h.7``, ``encoder.layers.encoder_layer_5``). The outermost such module
counts, but for stages, which are mostly sequences of blocks (``layer3`` of a ResNet, ``layers.2`` of a Swin).
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from lightning_offload.graph.memory_plan import Action
from lightning_offload.planning.policies.layers import Layers
from lightning_offload.planning.problem import Problem

OUTSIDE = -1
"""The segment of ops that are in none."""

_NUMBERED = re.compile(r"(\D*)\d+$")


_Path = tuple[str, ...]


def blocks(modules: Iterable[str]) -> dict[str, str]:
    """The block of each module that is in one.

    >>> blocks(["stem", "layer1.0.conv", "layer1.0.bn", "layer1.1.conv", "layer1.1.bn"])["layer1.1.bn"]
    'layer1.1'
    """
    paths: list[_Path] = [tuple(name.split(".")) for name in dict.fromkeys(modules) if name]
    inner: dict[_Path, set[_Path]] = {}
    for path in paths:
        for i in range(1, len(path)):
            inner.setdefault(path[:i], set()).add(path[i:])
    repeated = _repeated(inner)
    stages = _stages(inner, repeated)
    found: dict[str, str] = {}
    for path in paths:
        end = next((i for i in range(1, len(path)) if path[:i] in repeated), None)
        while end is not None and path[:end] in stages:
            end = next((i for i in (end + 1, end + 2) if i < len(path) and path[:i] in repeated), None)
        if end is not None:
            found[".".join(path)] = ".".join(path[:end])
    return found


def _repeated(inner: Mapping[_Path, set[_Path]]) -> set[_Path]:
    """Numbered modules with a sibling that has all the modules that they have, and others like it."""
    siblings: dict[tuple[_Path, str], list[_Path]] = {}
    for path, parts in inner.items():
        match = _NUMBERED.match(path[-1])
        if match is not None and len(parts) > 1:
            siblings.setdefault((path[:-1], match[1]), []).append(path)
    repeated: set[_Path] = set()
    for group in siblings.values():
        least = min(group, key=lambda path: (len(inner[path]), path))
        if any(inner[least] <= inner[path] for path in group if path != least):
            repeated.update(group)
    return repeated


def _stages(inner: Mapping[_Path, set[_Path]], repeated: set[_Path]) -> set[_Path]:
    """Repeated modules of which more than half is a sequence of such modules, at most one name further in."""
    within: Counter[_Path] = Counter()
    for path in repeated:
        for stage in {path[:-1], path[:-2]} & repeated:
            within[stage] += len(inner[path])
    return {stage for stage, num in within.items() if 2 * num > len(inner[stage])}


def by_block(problem: Problem) -> list[int] | None:
    """The segment of each op of forward, one for each block in the order in which they begin; None without blocks."""
    graph = problem.graph
    block_of = blocks(op.module for op in graph.ops if op.phase == "forward")
    number = {name: i for i, name in enumerate(dict.fromkeys(block_of.values()))}
    if len(number) < 2:
        return None
    return [number[block_of[op.module]] if op.module in block_of else OUTSIDE for op in graph.ops]


def sqrt_size(num: int) -> int:
    """How many of a number of segments to join for the square root of that number."""
    return math.ceil(num / round(math.sqrt(num)))


def grouped(segment_of_op: Sequence[int], size: int) -> list[int]:
    """So many successive segments joined."""
    return [segment if segment == OUTSIDE else segment // size for segment in segment_of_op]


def num_layers(layers: Layers) -> int:
    """How many layers there are to cut between."""
    return sum(layer.producer >= 0 for layer in layers.by_storage.values())


def equal_parts(layers: Layers, num_parts: int | None = None, crossing_bytes: Sequence[int] | None = None) -> list[int]:
    """Parts of near equal counts, cut where the fewest bytes cross.

    Args:
        layers: The step.
        num_parts: How many; by default the square root of the number of layers.
        crossing_bytes: Those of :func:`crossing_bytes_of`, where they are known.
    """
    graph = layers.problem.graph
    producers = [layer.producer for layer in layers.by_storage.values() if layer.producer >= 0]
    num_parts = round(math.sqrt(len(producers))) if num_parts is None else num_parts
    crossing = crossing_bytes_of(layers.problem) if crossing_bytes is None else crossing_bytes
    cuts: list[int] = []
    for part in range(1, num_parts):
        middle, reach = part * len(producers) / num_parts, len(producers) / num_parts / 2
        near = range(max(1, math.ceil(middle - reach)), min(len(producers), math.ceil(middle + reach)))
        positions = [producers[i] for i in near if not cuts or producers[i] > cuts[-1]]
        if positions:
            cuts.append(min(positions, key=lambda p: (crossing[p], p)))
    segments = np.searchsorted(np.array(cuts, dtype=np.int64), np.arange(len(graph.ops)), side="right")
    return [int(segment) for segment in segments]


def crossing_bytes_of(problem: Problem) -> list[int]:
    """By op: the bytes made before it in forward that it or later ones read."""
    graph = problem.graph
    last_reader: dict[int, int] = {}
    for i, op in enumerate(graph.ops):
        if op.phase == "forward":
            last_reader.update((v, i) for v in op.inputs)
    delta = [0] * (len(graph.ops) + 1)
    for v, last in last_reader.items():
        made = graph.values[v].producer
        if made >= 0:
            delta[made + 1] += graph.storages[graph.values[v].storage].num_bytes
            delta[last + 1] -= graph.storages[graph.values[v].storage].num_bytes
    return list(itertools.accumulate(delta))


class Replays:
    """What may be recomputed within segments.

    Args:
        layers: The step.
    """

    def __init__(self, layers: Layers) -> None:
        by_storage = layers.by_storage
        self._storages = [s for s, layer in by_storage.items() if layer.can_recompute and layer.producer >= 0]
        place = {s: i for i, s in enumerate(self._storages)}
        self._producers = np.array([by_storage[s].producer for s in self._storages], dtype=np.int64)
        links = [(place[o], i) for i, s in enumerate(self._storages) for o in by_storage[s].sources if o in place]
        self._links = np.array(links, dtype=np.int64).reshape(-1, 2)  # what a replay reads, and what it makes

    def inside(self, segment_of_op: npt.NDArray[np.int64]) -> dict[int, Action]:
        """Recompute what segments save, but for what replays of other segments read: those are the checkpoints."""
        segments = segment_of_op[self._producers]
        chosen = segments != OUTSIDE
        read, made = self._links[(chosen[self._links]).all(axis=1)].T
        chosen[read[segments[read] != segments[made]]] = False
        return {self._storages[i]: "recompute" for i in np.flatnonzero(chosen).tolist()}
