"""What the plans for a specialization count beside its own: gradients of earlier steps, and all that is none of it.

What of that a step was seen to drop in its midst (the outputs of the step before, above all) is memory until then. A
step that was recorded drops nothing, if it was the first one: what it left behind itself the next one may drop.

What a step touches counts in its graph, and tells what is beside it. In place of what is gone by now (the recorded
step's batch, say) the coming step has its own.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from lightning_offload.capture.departures import Departures, within
from lightning_offload.capture.live import LiveBytes
from lightning_offload.graph.step_graph import Accumulation, Departure, StepGraph
from lightning_offload.plugins.baseline import There

_MOST_TOGETHER = 8  # of gradients that may be there, told apart


StorageRef = weakref.ref[torch.UntypedStorage]
"""Weak, since addresses are used again."""


@dataclasses.dataclass(frozen=True, slots=True)
class ExternalStorages:
    """The persistent storages that a recorded step touches.

    Attributes:
        references: These, by identity.
        known: Those of them that were there when it began, gradients aside, with their bytes; None where nobody looked.
    """

    references: dict[int, StorageRef] = dataclasses.field(default_factory=dict)
    known: list[tuple[StorageRef, int]] | None = None

    @classmethod
    def seen(cls, live: LiveBytes, gradients: Collection[int]) -> ExternalStorages:
        """Those of a step whose bytes were counted.

        Args:
            live: What counted them.
            gradients: Identities of the gradients that were there when it began.
        """
        found = {key: entry for key, entry in live.external.items() if key not in gradients}
        return cls({key: entry[0] for key, entry in found.items()}, list(found.values()))

    def now(self) -> set[int]:
        """Identities of those that still live."""
        return {key for key, reference in self.references.items() if reference() is not None}

    def baseline_bytes(self, there: There, gradients: Collection[int], *, has_inputs: bool) -> int | None:
        """What is on the device beside the coming step; None where it is not known yet.

        Args:
            there: What is on the device.
            gradients: Identities of gradients.
            has_inputs: Whether what the coming step has in place of what is gone is there: as one begins.
        """
        if self.known is None:
            return None
        if not there.is_whole:
            return self._followed(there, gradients)
        excluded = self.now().union(gradients)
        baseline = there.bytes_but(excluded)
        gone_bytes = sum(num_bytes for reference, num_bytes in self.known if reference() is None)
        return max(0, baseline - gone_bytes) if has_inputs else baseline

    def _followed(self, there: There, gradients: Collection[int]) -> int:
        """The same where nobody listed all: in place of what is gone lies what is as large; an input may be larger."""
        excluded = {*self.now(), *gradients}
        unmatched = Counter(num_bytes for reference, num_bytes in self.known or [] if reference() is None)
        baseline_bytes = spare_bytes = 0
        found = (
            (key in there.inputs, storage.nbytes()) for key, storage in there.storages.items() if key not in excluded
        )
        for is_input, num_bytes in (*found, *((False, num_bytes) for num_bytes in there.replaced)):
            if unmatched[num_bytes]:
                unmatched[num_bytes] -= 1
                continue
            baseline_bytes += num_bytes
            spare_bytes += num_bytes if is_input else 0
        return baseline_bytes - min(spare_bytes, sum(size * number for size, number in unmatched.items()))

    def baseline_bytes_of(self, held_bytes: int, taken: Callable[[int], int], *, has_inputs: bool) -> int | None:
        """The same of the allocator's figure.

        Args:
            held_bytes: What it has handed out, gradients aside.
            taken: What it hands out for so many bytes.
            has_inputs: Whether what the coming step has in place of what is gone is there.
        """
        if self.known is None:
            return None
        external = sum(taken(num_bytes) for reference, num_bytes in self.known if has_inputs or reference() is not None)
        return max(0, held_bytes - external)


class OldGradients(NamedTuple):
    """Gradients of earlier steps.

    Attributes:
        before: Bytes of those that may be there before a step.
        in_backward: Those that may be there together in its backward.
        some_go: Whether a step was seen in which some went before its backward.
    """

    before: int = 0
    in_backward: tuple[Accumulation, ...] = ()
    some_go: bool = False

    @property
    def most_bytes(self) -> int:
        """Bytes of those in backward, at most."""
        return max((found.num_bytes for found in self.in_backward), default=0)

    def or_more(self, other: OldGradients) -> OldGradients:
        """What counts for steps with these and for such with others."""
        in_backward = self.in_backward
        if other.in_backward != in_backward:
            in_backward = _needing_most({*in_backward, *other.in_backward})
        return OldGradients(max(self.before, other.before), in_backward, self.some_go or other.some_go)

    def on(self, graph: StepGraph, recorded_bytes: int) -> StepGraph:
        """A step with those of them that are no storages of its own; itself where it has them.

        Args:
            graph: The step.
            recorded_bytes: Those that are.
        """
        in_backward = self.in_backward
        if recorded_bytes:
            in_backward = _needing_most({found.without(recorded_bytes) for found in in_backward} - {Accumulation()})
        accumulated = max((found.num_bytes for found in in_backward), default=0)
        before = max(self.before - recorded_bytes, accumulated)
        known = graph.old_gradient_bytes, graph.accumulated_bytes, graph.accumulations
        if known == (before, accumulated, in_backward):
            return graph
        return dataclasses.replace(
            graph, old_gradient_bytes=before, accumulated_bytes=accumulated, accumulations=in_backward
        )

    @classmethod
    def of(cls, graph: StepGraph, recorded_bytes: int = 0) -> OldGradients:
        """Those that a step counts, with those that are storages of its own."""
        before, accumulated = graph.old_gradient_bytes, graph.accumulated_bytes
        found = graph.accumulations or (Accumulation(idle_bytes=accumulated),)
        whole = {dataclasses.replace(it, added_to_bytes=it.added_to_bytes + recorded_bytes) for it in found}
        return cls(before + recorded_bytes, _needing_most(whole - {Accumulation()}), before > accumulated)


def _needing_most(found: Iterable[Accumulation]) -> tuple[Accumulation, ...]:
    """Those that no other one needs as much as, from the first gradient that is made to the last."""
    kept: list[Accumulation] = []
    for one in sorted(found, key=lambda it: (-it.num_bytes, -it.idle_bytes)):
        if not kept or one.idle_bytes > kept[-1].idle_bytes:
            kept.append(one)
    if len(kept) <= _MOST_TOGETHER:
        return tuple(kept)
    most, idle_bytes = kept[0].num_bytes, kept[-1].idle_bytes
    return (Accumulation(idle_bytes=idle_bytes, added_to_bytes=max(0, most - idle_bytes)),)


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
class PlannedBaseline:
    """What the plans for a specialization count beside what it makes.

    Attributes:
        gradients: Gradients of earlier steps.
        recorded_gradient_bytes: Those that the recorded step accumulated into: they are in its graph.
        headroom_bytes: What the plan in force leaves free because what is beside the step is growing.
        patience: At how many counts in a row there must be much less than the plan in force has room for, for another
            plan to be made: twice as many each time, or what comes and goes would have plans made for ever.
        is_known: Whether that was counted, since the last recording.
        state_bytes: The training's state as it was counted then, gradients aside; None where nobody listed it.
        dropping: What of it steps drop.
        left_behind: What the recorded step made and left on the device, until a later one shows what becomes of that.
        made_gradients: The gradients that the recorded step made.
        guessed: What a step's backward is taken to find of gradients that no step was seen with yet.
        may_guess: Whether it is: no plan is refused for that.
    """

    gradients: OldGradients = dataclasses.field(default_factory=OldGradients)
    recorded_gradient_bytes: int = 0
    headroom_bytes: int = 0
    patience: int = 1
    is_known: bool = False
    state_bytes: int | None = None
    dropping: Dropping = dataclasses.field(default_factory=Dropping)
    left_behind: tuple[tuple[StorageRef, Departure], ...] = ()
    made_gradients: Sequence[StorageRef] = ()
    guessed: OldGradients = dataclasses.field(default_factory=OldGradients)
    may_guess: bool = True
    _guess: tuple[Departure, ...] = ()
    _num_lower: int = 0

    @property
    def is_lower(self) -> bool:
        """Whether there was much less at the last count."""
        return self._num_lower > 0

    def gives_back(self, *, is_much_less: bool) -> bool:
        """What is beside a step was counted: whether what the plan in force leaves free for more is given back.

        Args:
            is_much_less: Whether there is much less now.
        """
        self._num_lower = self._num_lower + 1 if is_much_less else 0
        if self._num_lower < self.patience:
            return False
        self._num_lower, self.patience = 0, 2 * self.patience
        return True

    def note_gradients(self, gradients: Mapping[int, int]) -> None:
        """A step begins with gradients of earlier ones: bytes by identity."""
        before = sum(gradients.values())
        self.gradients = known = self.gradients.or_more(OldGradients(before=before))
        if before > known.most_bytes:
            made = {
                storage._cdata for storage in (reference() for reference in self.made_gradients) if storage is not None
            }
            added_to = sum(num_bytes for key, num_bytes in gradients.items() if key in made)
            found = Accumulation(idle_bytes=before - added_to, added_to_bytes=added_to)
            self.guessed = OldGradients(in_backward=(found,))

    def learn_gradients(self, old: OldGradients) -> None:
        """A step, or one like it, has shown what becomes of them."""
        self.gradients, self.guessed = self.gradients.or_more(old), OldGradients()

    def with_gradients(self, graph: StepGraph) -> StepGraph:
        """A step with those that are none of its own; itself where it has them."""
        old = self.gradients
        if self.may_guess and not old.some_go:
            old = old.or_more(self.guessed)
        return old.on(graph, self.recorded_gradient_bytes)

    def with_extra(self, graph: StepGraph, num_bytes: int) -> StepGraph:
        """A step with so much on the device beside it; itself where it has that."""
        departures = self._departing(graph, num_bytes)
        if graph.extra_bytes == num_bytes and graph.departures == departures:
            return graph
        return dataclasses.replace(graph, extra_bytes=num_bytes, departures=departures)

    def recorded(
        self,
        graph: StepGraph,
        gradient_bytes: int,
        made_gradients: Sequence[StorageRef],
        left: Sequence[tuple[torch.UntypedStorage, int]],
    ) -> None:
        """A step was recorded.

        Args:
            graph: It.
            gradient_bytes: Gradients of earlier steps that are among its storages.
            made_gradients: Those that it made.
            left: What it left on the device, gradients aside, each with the tick at which it was made.
        """
        self.recorded_gradient_bytes, self.is_known = gradient_bytes, False
        self.made_gradients = made_gradients
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

    def guess_less(self, graph: StepGraph | None) -> StepGraph | None:
        """The step with less beside it than is likely; None where all that is known.

        It may drop what the one before left behind for its own, and gradients before its backward.
        """
        if graph is not None and self.may_guess:
            self.may_guess = False
            if (found := self.with_gradients(graph)) is not graph:
                return found
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
