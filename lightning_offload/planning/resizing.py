"""Steps that were recorded at one size, at others: roughly, where their structure changes along with their sizes.

The *size* of a step is how many elements it is given, as a part of the most that one was: the largest such part of all
tensors whose number of elements varies.

What is saved in shapes that vary grows with the size, with its square where two lengths of the shape vary. What is
made of that does so, too, unless it is as large as something that does not vary, as gradients of parameters are. All
this is rough; what it lacks shows in steps that are measured. Where a structure stays the same,
:mod:`~.step_model` has laws that hold to the byte; they need three recordings of one structure, and this needs one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection

from lightning_offload.graph.step_graph import Op, StepGraph

Shapes = tuple[tuple[int, ...], ...]
"""Of tensors: those that a step is given, or those that it saves, by pack."""


class InputShapes:
    """What is known of how the shapes vary that steps are given, and with them those of what they save."""

    def __init__(self) -> None:
        self._first: Shapes = ()
        self._most: tuple[int, ...] = ()  # elements, by tensor
        self._varies: tuple[list[bool], ...] = ()  # by tensor and dimension
        self._shared: frozenset[int] = frozenset()  # sizes that all of them save

    def learn(self, input_shapes: Shapes, saved: Shapes) -> None:
        """A step was recorded.

        Args:
            input_shapes: The shapes of what it was given.
            saved: The shapes of what it saved.
        """
        if tuple(map(len, input_shapes)) != tuple(map(len, self._first)):
            self._first, self._most = input_shapes, tuple(map(math.prod, input_shapes))
            self._varies = tuple([False] * len(shape) for shape in input_shapes)
            self._shared = _sizes_in(saved)
            return
        for varies, first, shape in zip(self._varies, self._first, input_shapes, strict=True):
            varies[:] = (known or n != m for known, n, m in zip(varies, first, shape, strict=True))
        self._most = tuple(map(max, zip(self._most, map(math.prod, input_shapes), strict=True)))
        if input_shapes != self._first:
            self._shared &= _sizes_in(saved)

    @property
    def most(self) -> tuple[int, ...]:
        """The most elements that any step was given, by tensor."""
        return self._most

    @property
    def vary(self) -> bool:
        """Whether any of them do."""
        return any(map(any, self._varies))

    @property
    def num_together(self) -> int:
        """How many dimensions of one tensor vary, at most."""
        return max(map(sum, self._varies), default=0)

    def size_of(self, input_shapes: Shapes) -> float:
        """The size of a step that is given tensors of these shapes; more than 1 where none was recorded as large."""
        if len(input_shapes) != len(self._most):
            return 1.0
        rows = zip(input_shapes, self._most, self._varies, strict=True)
        return max((math.prod(shape) / most for shape, most, varies in rows if any(varies) and most), default=1.0)

    def varying_in(self, input_shapes: Shapes, saved: Shapes) -> frozenset[int]:
        """Sizes in a recorded step that are other ones in others: those that it was given, and what not all save."""
        if not self.vary:
            return frozenset()
        rows = zip(input_shapes, self._varies, strict=True)
        lengths = {n for shape, varies in rows for n, is_varying in zip(shape, varies, strict=True) if is_varying}
        return frozenset(lengths) | (_sizes_in(saved) - self._shared)


def _sizes_in(shapes: Shapes) -> frozenset[int]:
    return frozenset(size for shape in shapes for size in shape)


def resized(
    graph: StepGraph, saved: Shapes, varying: Collection[int], factor: float, num_together: int = 1
) -> StepGraph:
    """A step at another size.

    Args:
        graph: The step as it was recorded.
        saved: The shapes of what is saved, by pack.
        varying: Sizes that vary.
        factor: How many times as large it is.
        num_together: How many dimensions of what it is given vary at once: so many count once in what is saved.
    """
    powers = _powers(graph, saved, varying)
    factors = {
        storage: factor ** (max(1, power + 1 - num_together) if factor > 1 else 1)  # at most so much smaller
        for storage, power in powers.items()
        if power
    }
    storages = tuple(
        dataclasses.replace(storage, num_bytes=math.ceil(factors.get(index, 1) * storage.num_bytes))
        for index, storage in enumerate(graph.storages)
    )

    def op_resized(op: Op) -> Op:
        values = (graph.values[value].storage for value in (*op.inputs, *op.outputs))
        most = max((factors[storage] for storage in values if storage in factors), default=1.0)
        if most == 1:
            return op
        return dataclasses.replace(op, seconds=most * op.seconds, workspace_bytes=math.ceil(most * op.workspace_bytes))

    return dataclasses.replace(graph, storages=storages, ops=tuple(map(op_resized, graph.ops)))


def _powers(graph: StepGraph, saved: Shapes, varying: Collection[int]) -> dict[int, int]:
    """By storage that a step made: how many of its dimensions vary, as far as that can be told."""
    powers: dict[int, int] = {}
    for save, shape in zip(graph.saves, saved, strict=True):
        storage = graph.values[save.value].storage
        if not graph.storages[storage].is_persistent:
            powers[storage] = max(powers.get(storage, 0), sum(size in varying for size in shape))
    by_bytes: dict[int, set[int]] = {}
    for there in graph.storages:
        if there.is_persistent:
            by_bytes.setdefault(there.num_bytes, set()).add(0)
    for index, power in powers.items():
        by_bytes.setdefault(graph.storages[index].num_bytes, set()).add(power)
    for op in graph.ops:
        read = [powers[index] for value in op.inputs if (index := graph.values[value].storage) in powers]
        for value in op.outputs:
            index = graph.values[value].storage
            if index in powers or graph.storages[index].is_persistent:
                continue
            as_large = by_bytes.get(graph.storages[index].num_bytes, set())
            powers[index] = next(iter(as_large)) if len(as_large) == 1 else max(read, default=1)
    return powers


def varying_share(graph: StepGraph, saved: Shapes, varying: Collection[int]) -> float:
    """Which part of what a step makes and saves grows with its size."""
    shapes = {graph.values[save.value].storage: shape for save, shape in zip(graph.saves, saved, strict=True)}
    made = [(storage, shape) for index, shape in shapes.items() if not (storage := graph.storages[index]).is_persistent]
    num_varying = sum(storage.num_bytes for storage, shape in made if not set(shape).isdisjoint(varying))
    return num_varying / max(1, sum(storage.num_bytes for storage, _ in made))
