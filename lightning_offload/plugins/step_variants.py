"""The structures that steps of one specialization were recorded with, and the one of them that the others follow.

Routing, dropped layers and the like make steps of one shape differ in their ops. What is planned is the *widest*
recorded one: that which has most saved at once. The others lack parts of it, or have some of a few bytes that it does
not have. Where several were recorded with the same ops but other sizes, each tensor counts with the most that it had.

Kinds that differ in sizes, and whose structure changes as well, share theirs: what was recorded at one size is resized
to others (:mod:`~lightning_offload.planning.resizing`).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import NamedTuple

from lightning_offload.graph.step_graph import StepGraph
from lightning_offload.planning.resizing import InputShapes, Shapes, resized, varying_share
from lightning_offload.planning.step_model import structure_of
from lightning_offload.plugins.planned_baseline import ExternalStorages
from lightning_offload.tensors.saved_forms import SavedForm, opened, sizes_that_vary

_MAX_VARIANTS = 4  # structures in turns, with a plan each

_LARGE = 0.5  # of the largest size


class Variant(NamedTuple):
    """A recorded step.

    Attributes:
        graph: The step.
        forms: By pack: what was saved.
        open_sizes: Sizes that depended on data, or on what else differs between steps.
        external: The persistent storages that it touches.
        gradient_bytes: Gradients of earlier steps that it accumulated into.
        input_shapes: The shapes of the tensors that it was given.
        varying: Sizes that vary with these.
    """

    graph: StepGraph
    forms: tuple[SavedForm, ...]
    open_sizes: frozenset[int]
    external: ExternalStorages
    gradient_bytes: int
    input_shapes: Shapes = ()
    varying: frozenset[int] = frozenset()

    @property
    def saved_shapes(self) -> Shapes:
        """The shapes of what was saved, by pack."""
        return tuple([form.shape for form in self.forms])

    @property
    def route(self) -> tuple[SavedForm, ...]:
        """What was saved, with the sizes open that may be any."""
        return opened(self.forms, self.open_sizes | self.varying)

    @property
    def largest_open_bytes(self) -> int:
        """The largest of the saved tensors whose size depends on data: others like it may be larger yet."""
        saves = zip(self.graph.saves, self.forms, strict=True)
        saved = (save.value for save, form in saves if not self.open_sizes.isdisjoint(form.shape))
        return max((self.graph.storages[self.graph.values[value].storage].num_bytes for value in saved), default=0)

    @property
    def varying_share(self) -> float:
        """Which part of what it saves, of what it made, varies with what it is given."""
        return varying_share(self.graph, self.saved_shapes, self.varying)

    @property
    def saved_bytes(self) -> int:
        """The most that it has saved at once, of what it made, and that backward has not done with."""
        ends: dict[int, int] = {}
        events: list[tuple[int, int]] = []
        for save in self.graph.saves:
            storage = self.graph.values[save.value].storage
            if not self.graph.storages[storage].is_persistent:
                if storage not in ends:
                    events.append((save.pack_tick, self.graph.storages[storage].num_bytes))
                ends[storage] = max(ends.get(storage, 0), save.release_tick)
        events += [(tick, -self.graph.storages[storage].num_bytes) for storage, tick in ends.items()]
        return max(itertools.accumulate(num_bytes for _, num_bytes in sorted(events)), default=0)


class Basis(NamedTuple):
    """What the widest structure at any size depends on.

    Attributes:
        graph: The widest that was recorded.
        open_sizes: Sizes there that vary, with data or with what steps are given.
        most: By tensor that they are given: the most elements of any.
    """

    graph: StepGraph
    open_sizes: frozenset[int]
    most: tuple[int, ...]

    def is_same(self, other: Basis) -> bool:
        """Whether it is the very same recording, seen the same way."""
        return self.graph is other.graph and self[1:] == other[1:]


class StepVariants:
    """The structures that steps of one specialization, or of specializations that differ in sizes, were recorded with.

    Attributes:
        latest: The last recorded one.
        version: Grows with what is known.
    """

    def __init__(self) -> None:
        self._new: list[Variant] = []  # most specializations have one structure, and nobody asks for it
        self._variants: dict[str, Variant] = {}
        self._given_up: set[str] = set()
        self._smallest: dict[str, Variant] = {}
        self._input_shapes = InputShapes()
        self.latest: Variant | None = None
        self.version = 0
        self._basis: Basis | None = None

    def __len__(self) -> int:
        """How many recorded steps it is known by."""
        return len(self._variants) + len(self._new)

    def __iter__(self) -> Iterator[Variant]:
        """These."""
        yield from self._variants.values()
        yield from self._new

    def learn(self, variant: Variant) -> None:
        """Take a recorded step over."""
        self._input_shapes.learn(variant.input_shapes, variant.saved_shapes)
        self._new.append(variant)
        self.latest = variant
        self._changed()
        if len(self._new) > _MAX_VARIANTS:
            self._sort()

    def size_of(self, input_shapes: Shapes) -> float:
        """The size of a step that is given tensors of these shapes; more than 1 where none was recorded as large."""
        return self._input_shapes.size_of(input_shapes)

    @property
    def basis(self) -> Basis:
        """What :meth:`widest` depends on, but for the size: as long as it is the same, so is that."""
        if self._basis is None:
            widest, input_shapes = self._variants[self._widest()], self._input_shapes
            varying = input_shapes.varying_in(widest.input_shapes, widest.saved_shapes)
            self._basis = Basis(widest.graph, widest.open_sizes | varying, input_shapes.most)
        return self._basis

    def widest(self, size: float = 1.0) -> Variant:
        """The one that has most saved at once of those that were not given up, with the sizes open that vary.

        Args:
            size: What it is resized to.
        """
        widest, input_shapes = self._variants[self._widest()], self._input_shapes
        if not input_shapes.vary:
            return widest
        found = widest._replace(varying=input_shapes.varying_in(widest.input_shapes, widest.saved_shapes))
        factor = size / input_shapes.size_of(widest.input_shapes)
        if factor == 1:
            return found
        may_vary = found.varying | found.open_sizes
        return found._replace(
            graph=resized(found.graph, found.saved_shapes, may_vary, factor, input_shapes.num_together)
        )

    def give_up_widest(self) -> bool:
        """Leave the widest one out from now on: no plan for it is within the budget; whether there is another.

        Where it has the largest sizes of several, the smallest of these comes before others.
        """
        widest = self._widest()
        self._changed()
        if widest not in self._given_up and self._variants[widest].graph is not self._smallest[widest].graph:
            open_sizes = self._variants[widest].open_sizes  # one rare large size is not for all to be planned for
            self._variants[widest] = self._smallest[widest]._replace(open_sizes=open_sizes)
            return True
        self._given_up.add(widest)
        return any(name not in self._given_up for name in self._variants)

    def reconsider(self) -> None:
        """Count those again that were given up: there may be more room."""
        self._given_up.clear()
        self._changed()

    def _changed(self) -> None:
        self.version += 1
        self._basis = None

    def _widest(self) -> str:
        self._sort()
        found = [name for name in self._variants if name not in self._given_up] or list(self._variants)
        return max(found, key=lambda name: self._width(self._variants[name]))

    def _width(self, variant: Variant) -> tuple[bool, float]:
        """What the widest has most of: at sizes much smaller than the largest, what resizing makes of it is a guess."""
        size = self.size_of(variant.input_shapes)
        return size >= _LARGE, variant.saved_bytes / size

    def _sort(self) -> None:
        """Put what was recorded with the same ops together."""
        new, self._new = self._new, []
        for variant in new:
            structure = structure_of(variant.graph)
            known = self._variants.pop(structure, None)
            if known is None:
                smallest = variant
            elif known.input_shapes == variant.input_shapes:
                smallest = min(self._smallest[structure], variant, key=lambda found: found.saved_bytes)
                varied = sizes_that_vary(known.forms, variant.forms)
                variant = variant._replace(
                    graph=_largest_of(known.graph, variant.graph),
                    open_sizes=known.open_sizes | variant.open_sizes | varied,
                )
            else:
                variant = smallest = max(variant, known, key=lambda found: self.size_of(found.input_shapes))
            self._variants[structure], self._smallest[structure] = variant, smallest
            if len(self._variants) > _MAX_VARIANTS:
                narrowest = min(
                    self._variants, key=lambda name: (name not in self._given_up, *self._width(self._variants[name]))
                )
                del self._variants[narrowest], self._smallest[narrowest]


def _largest_of(one: StepGraph, other: StepGraph) -> StepGraph:
    """A step with each tensor as large as in either of two of one structure; the first of these where it is."""
    if all(mine.num_bytes >= its.num_bytes for mine, its in zip(one.storages, other.storages, strict=True)):
        return one
    storages = tuple(
        dataclasses.replace(storage, num_bytes=max(storage.num_bytes, others.num_bytes))
        for storage, others in zip(other.storages, one.storages, strict=True)
    )
    workspaces = (
        dataclasses.replace(op, workspace_bytes=max(op.workspace_bytes, others.workspace_bytes))
        for op, others in zip(other.ops, one.ops, strict=True)
    )
    return dataclasses.replace(other, storages=storages, ops=tuple(workspaces))
