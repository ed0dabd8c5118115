"""What the plans for a kind of step count beside what it makes: gradients of earlier steps, and all that is none of it.

What of that a step was seen to drop in its midst (the outputs of the step before, above all) is memory until then. A
step that was recorded drops nothing, if it was the first one: what it left behind itself the next one may drop.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Sequence

import torch

from lightning_offload.capture.departures import Departures, within
from lightning_offload.graph.step_graph import Departure, StepGraph
from lightning_offload.plugins.touched import StorageRef


@dataclasses.dataclass(slots=True)
class Dropping:
    """What steps drop of what is on the device beside them; those of a family are one.

    Attributes:
        drops: What a step was seen to.
        seen_from: What there was then; None where that was not counted yet.
    """

    drops: Departures | None = None
    seen_from: int | None = None

    def take(self, other: Dropping) -> None:
        """Know what another one knows, if it does."""
        if other.drops is not None:
            self.drops, self.seen_from = other.drops, other.seen_from

    @property
    def is_seen(self) -> bool:
        """Whether one was seen to drop anything."""
        return self.drops is not None and bool(self.drops.dropped)


@dataclasses.dataclass(slots=True)
class Beside:
    """What the plans for a kind of step count beside what it makes.

    Attributes:
        old_gradient_bytes: Gradients of earlier steps that may be there before a step.
        accumulated_bytes: Those that may still be there in its backward.
        recorded_gradient_bytes: Those that the recorded step accumulated into: they are in its graph.
        headroom_bytes: What the plan in force leaves free because what is beside the step is growing.
        is_known: Whether that was counted, since the last recording.
        dropping: What of it steps drop.
        left_behind: What the recorded step made and left on the device, until a later one shows what becomes of that.
    """

    old_gradient_bytes: int = 0
    accumulated_bytes: int = 0
    recorded_gradient_bytes: int = 0
    headroom_bytes: int = 0
    is_known: bool = False
    dropping: Dropping = dataclasses.field(default_factory=Dropping)
    left_behind: tuple[tuple[StorageRef, Departure], ...] = ()
    _guess: tuple[Departure, ...] = ()

    def note_gradients(self, old_bytes: int, accumulated_bytes: int) -> None:
        """Count gradients of earlier steps: those there before forward, those still there in backward."""
        self.old_gradient_bytes = max(self.old_gradient_bytes, old_bytes, accumulated_bytes)
        self.accumulated_bytes = max(self.accumulated_bytes, accumulated_bytes)

    def forget_gradients(self) -> None:
        """Count none: nothing is known of the step any more."""
        self.old_gradient_bytes = self.accumulated_bytes = 0

    def with_gradients(self, graph: StepGraph) -> StepGraph:
        """A step with those that are none of its own; itself where it has them."""
        old = max(0, self.old_gradient_bytes - self.recorded_gradient_bytes)
        accumulated = max(0, self.accumulated_bytes - self.recorded_gradient_bytes)
        if (old, accumulated) == (graph.old_gradient_bytes, graph.accumulated_bytes):
            return graph
        return dataclasses.replace(graph, old_gradient_bytes=old, accumulated_bytes=accumulated)

    def with_extra(self, graph: StepGraph, num_bytes: int) -> StepGraph:
        """A step with so much on the device beside it; itself where it has that."""
        departures = self._departing(graph, num_bytes)
        if graph.extra_bytes == num_bytes and graph.departures == departures:
            return graph
        return dataclasses.replace(graph, extra_bytes=num_bytes, departures=departures)

    def recorded(
        self, graph: StepGraph, accumulated_bytes: int, left: Sequence[tuple[torch.UntypedStorage, int]]
    ) -> None:
        """A step was recorded.

        Args:
            graph: It.
            accumulated_bytes: Gradients of earlier steps that were there in its backward.
            left: What it left on the device, gradients aside, each with the tick at which it was made.
        """
        self.recorded_gradient_bytes, self.is_known = accumulated_bytes, False
        self.left_behind = tuple(
            (weakref.ref(storage), Departure(tick=tick, num_bytes=graph.taken_bytes(storage.nbytes())))
            for storage, tick in left
        )
        self._guess, self.dropping = (), Dropping()

    def note_drops(self, drops: Departures, graph: StepGraph | None, *, was_recorded: bool) -> StepGraph | None:
        """A watched step has shown what it drops.

        Args:
            drops: That.
            graph: The step.
            was_recorded: Whether it was just recorded: what it left behind counts still.

        Returns:
            The step with that, where nothing else is known of it.
        """
        self.dropping.drops, self.dropping.seen_from = drops, graph.extra_bytes if graph is not None else None
        if was_recorded or graph is None:
            self.dropping.seen_from = None
            return graph
        self.left_behind, self._guess = (), ()
        return self.with_extra(graph, graph.extra_bytes)

    def guess_drops(self, graph: StepGraph | None) -> StepGraph | None:
        """The step, dropping what the one before left behind for its own; None where that is known, or nothing."""
        left = [departure for reference, departure in self.left_behind if reference() is not None]
        if graph is None or not left or self.dropping.is_seen:
            return None
        self.left_behind, self.dropping.seen_from = (), None
        self._guess = tuple(sorted(left, key=lambda departure: departure.tick))
        found = self.with_extra(graph, graph.extra_bytes)
        return found if found.departures else None

    def _departing(self, graph: StepGraph, num_bytes: int) -> tuple[Departure, ...]:
        """What the coming step drops of so much: where there is less than when that was seen, less of it."""
        dropping = self.dropping
        seen = dropping.drops.on(graph) if dropping.drops is not None and dropping.is_seen else self._guess
        if not seen:
            return ()
        if dropping.seen_from is None:
            dropping.seen_from = num_bytes
        seen_bytes = sum(departure.num_bytes for departure in seen)
        return within(seen, min(num_bytes, seen_bytes - max(0, dropping.seen_from - num_bytes)))
