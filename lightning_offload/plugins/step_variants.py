"""The structures that steps of one kind were recorded with, and the one of them that the others follow.

Routing, dropped layers and the like make steps of one shape differ in their ops. What is planned is the *widest*
recorded one: that which has most saved at once. The others lack parts of it, or have some of a few bytes that it does
not have. Where several were recorded with the same ops but other sizes, each tensor counts with the most that it had.
"""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from collections.abc import Iterator
from typing import NamedTuple

import torch

from lightning_offload.graph.step_graph import StepGraph
from lightning_offload.planning.step_model import structure_of
from lightning_offload.tensors.saved_forms import OPEN, SavedForm, opened, sizes_that_vary

_MAX_VARIANTS = 4

StorageRef = weakref.ref[torch.UntypedStorage]


class Variant(NamedTuple):
    """A recorded step.

    Attributes:
        graph: The step.
        forms: By pack: what was saved.
        open_sizes: Sizes that depended on data.
        touched: The persistent storages that it touches, by identity.
        known: Those of them that were there when it began, gradients aside, with their bytes.
        gradient_bytes: Gradients of earlier steps that it accumulated into.
    """

    graph: StepGraph
    forms: tuple[SavedForm, ...]
    open_sizes: frozenset[int]
    touched: dict[int, StorageRef]
    known: list[tuple[StorageRef, int]] | None
    gradient_bytes: int

    @property
    def largest_open_bytes(self) -> int:
        """The largest of the saved tensors with an open size: others like it may be there where it is larger yet."""
        saved = (save.value for save, form in zip(self.graph.saves, self.forms, strict=True) if OPEN in form.shape)
        return max((self.graph.storages[self.graph.values[value].storage].num_bytes for value in saved), default=0)

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


class StepVariants:
    """The structures that steps of one kind were recorded with."""

    def __init__(self) -> None:
        self._new: list[Variant] = []  # most kinds have one structure, and nobody asks for it
        self._variants: dict[str, Variant] = {}
        self._open_sizes: set[int] = set()
        self._given_up: set[str] = set()
        self._smallest: dict[str, Variant] = {}

    def __len__(self) -> int:
        """How many recorded steps it is known by."""
        return len(self._variants) + len(self._new)

    def __iter__(self) -> Iterator[Variant]:
        """These."""
        yield from self._variants.values()
        yield from self._new

    def learn(self, variant: Variant) -> None:
        """Take a recorded step over."""
        self._new.append(variant)
        if len(self._new) > _MAX_VARIANTS:
            self._sort()

    def widest(self) -> Variant:
        """The one that has most saved at once of those that were not given up, with the sizes open that vary."""
        widest = self._variants[self._widest()]
        return widest._replace(forms=opened(widest.forms, self._open_sizes))

    def give_up_widest(self) -> bool:
        """Leave the widest one out from now on: no plan for it is within the budget; whether there is another.

        Where it has the largest sizes of several, the smallest of these comes before others.
        """
        widest = self._widest()
        if widest not in self._given_up and self._variants[widest].graph is not self._smallest[widest].graph:
            self._variants[widest] = self._smallest[widest]  # one rare large size is not for all to be planned for
            return True
        self._given_up.add(widest)
        return any(name not in self._given_up for name in self._variants)

    def reconsider(self) -> None:
        """Count those again that were given up: there may be more room."""
        self._given_up.clear()

    def _widest(self) -> str:
        self._sort()
        found = [name for name in self._variants if name not in self._given_up] or list(self._variants)
        return max(found, key=lambda name: self._variants[name].saved_bytes)

    def _sort(self) -> None:
        """Put what was recorded with the same ops together."""
        new, self._new = self._new, []
        for variant in new:
            structure = structure_of(variant.graph)
            known = self._variants.pop(structure, None)
            self._open_sizes.update(variant.open_sizes)
            smallest = min(self._smallest.get(structure, variant), variant, key=lambda found: found.saved_bytes)
            self._smallest[structure] = smallest
            if known is not None:
                self._open_sizes.update(sizes_that_vary(known.forms, variant.forms))
                variant = variant._replace(graph=_largest_of(known.graph, variant.graph))
            self._variants[structure] = variant
            if len(self._variants) > _MAX_VARIANTS:
                narrowest = min(
                    self._variants, key=lambda name: (name not in self._given_up, self._variants[name].saved_bytes)
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
