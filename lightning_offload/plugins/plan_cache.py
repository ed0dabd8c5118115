"""The specializations that a memory plugin has met, each with its plan, and the families of those that differ in sizes.

A shape that was recorded has a plan of its own. One that was not is served by its family, if that can predict it:
several shapes by one plan, made for the largest of them.

Memory: graphs and plans take at most :data:`MAX_BYTES`; the specializations that did not run for longest are dropped,
and come back by being extrapolated, or recorded, again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import operator
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, TypeVar

from lightning_offload.errors import PlanError
from lightning_offload.graph.memory_plan import MemoryPlan
from lightning_offload.graph.step_graph import StepGraph
from lightning_offload.plugins.hardware import Hardware
from lightning_offload.plugins.lifecycle import (
    align,
    begin_step,
    lost_seconds,
    pays,
    record_again,
)
from lightning_offload.plugins.plan_entry import Phase, PlanEntry
from lightning_offload.plugins.plan_source import ShapeBucket
from lightning_offload.plugins.replanning import Reason
from lightning_offload.plugins.shape_families import Extrapolated, ShapeFamily, StepShape
from lightning_offload.plugins.structure_changes import StructureChanges
from lightning_offload.tensors import custom_ops

_T = TypeVar("_T")
_SCHEMA = 1  # of what checkpoints keep


_num_recording = 0


@contextlib.contextmanager
def every_shape_recorded() -> Iterator[None]:
    """Around steps of which each new shape is to be recorded, though others could predict it: trials of sizes."""
    global _num_recording
    _num_recording += 1
    try:
        yield
    finally:
        _num_recording -= 1


MAX_BYTES = 128 << 20
"""Most memory for graphs and plans, half of it for what families are known by; the longest unused are dropped."""

_ENTRY_BYTES = 4096  # of one without a graph: its entry, its signature, what it touches


def _bytes_of_graph(graph: StepGraph, *, with_ops: bool = True) -> int:
    """What a graph takes in memory, roughly."""
    own_ops = 300 * len(graph.ops) if with_ops else 0  # those of an extrapolated step are its family's
    return own_ops + 110 * (len(graph.storages) + len(graph.values) + len(graph.saves))


def _bytes_of(entry: PlanEntry) -> int:
    """What a specialization takes in memory, roughly."""
    if entry.graph is None:
        return _ENTRY_BYTES
    graph = _bytes_of_graph(entry.graph, with_ops=not isinstance(entry.source, ShapeBucket) or entry.source.has_own_ops)
    plan = 160 * (len(entry.program.op_names) + 2 * len(entry.program.decisions)) if entry.program is not None else 0
    variants = 0 if entry.spans_sizes else _bytes_of_variants(entry.changes)
    return _ENTRY_BYTES + graph + plan + variants


def _bytes_of_variants(changes: StructureChanges) -> int:
    return sum(_bytes_of_graph(variant.graph) for variant in changes.variants)


def _bytes_of_family(family: ShapeFamily) -> int:
    """What a family takes: the steps that it is known by, and a model and a planner of about two more."""
    graphs = [_bytes_of_graph(sample.graph) for sample in family.samples.values()]
    return _ENTRY_BYTES + sum(graphs) + 2 * max(graphs, default=0) + _bytes_of_variants(family.changes)


def _unused_for_longest(known: Mapping[str, _T], bytes_of: Callable[[_T], int], *, but: str) -> list[str]:
    """What is to be dropped, by keys, where all of it takes too much.

    Args:
        known: All, in the order in which it was used last.
        bytes_of: What each takes.
        but: The one that is in use.
    """
    excess = sum(map(bytes_of, known.values())) - MAX_BYTES // 2
    dropped = []
    for key, item in known.items():
        if excess <= 0 or key == but:
            break
        excess -= bytes_of(item)
        dropped.append(key)
    return dropped


def _size_above(size: float, grain: int) -> float:
    """A size, rounded up so that few plans serve all: to a part of an octave."""
    return 2 ** (math.ceil(grain * math.log2(size) - _SLACK) / grain) if size > 0 else 1.0


_GRAIN, _FINE_GRAIN = 4, 64  # parts of an octave
_SLACK = 1e-6  # of a part: sizes on the grid stay where they are
_MAX_SHAPES = 1 << 16  # that are told apart


@dataclasses.dataclass(slots=True)
class ShapeFigures:
    """How a training with changing shapes went.

    Attributes:
        num_shapes: Different shapes.
        num_at_first_sight: Those of them whose first step was planned.
        num_deviations: Steps that left their plan.
        num_aligned: Steps under the plan for another structure, which they followed as far as they could.
        astray_bytes: What they saved that it did not have.
        planning_seconds: Host time that plans took.
    """

    num_shapes: int = 0
    num_at_first_sight: int = 0
    num_deviations: int = 0
    num_aligned: int = 0
    astray_bytes: int = 0
    planning_seconds: float = 0.0

    @contextlib.contextmanager
    def planning(self) -> Iterator[Callable[[], float]]:
        """Around the making of a plan, or none; gives what tells how long it has taken."""
        start = time.perf_counter()
        try:
            yield lambda: time.perf_counter() - start
        finally:
            self.planning_seconds += time.perf_counter() - start


def _row_of(signature: str, graph: StepGraph, gradient_bytes: int) -> dict[str, Any]:
    return {"signature": signature, "graph": graph.to_json(), "gradient_bytes": gradient_bytes}


def _step_of(row: Any) -> tuple[str, StepGraph, int]:
    """What :func:`_row_of` was given.

    Raises:
        PlanError: The graph is malformed.
        KeyError: A part is missing.
        TypeError: A part is of another type.
        ValueError: A number is wrong.
    """
    graph, gradient_bytes = StepGraph.from_json(_text_of(row, "graph")), _number(row.get("gradient_bytes", 0))
    if gradient_bytes > graph.persistent_bytes:
        raise ValueError("gradients are larger than what was there")
    return _text_of(row, "signature"), graph, gradient_bytes


def _text_of(row: Any, name: str) -> str:
    if not isinstance(row[name], str):
        raise TypeError(f"{name} must be text")
    return str(row[name])


def _number(item: Any) -> int:
    if not isinstance(item, int) or item < 0:
        raise ValueError("sizes must be numbers that are not negative")
    return item


class PlanCache:
    """The specializations that a memory plugin has met, each with its plan, and the figures of the one that ran last.

    Attributes:
        entries: By the signature of their inputs, or of a family and the sizes that an extrapolated one is for; the one
            that ran last comes last.
        families: Kinds that differ in sizes alone, by what they have in common.
        figures: How that went.
        key: Signature of the specialization that ran last.
        entry: That specialization.
        phase: What its last step did.
        is_first_sight: Whether that was the first step of its shape.
        num_steps: Steps so far, of all specializations.
        num_planned: Those of them that ran under a plan.
    """

    def __init__(self) -> None:
        self.entries: OrderedDict[str, PlanEntry] = OrderedDict()
        self.families: OrderedDict[str, ShapeFamily] = OrderedDict()
        self.figures = ShapeFigures()
        self.key = ""
        self.entry = PlanEntry()
        self.phase: Phase = "idle"
        self.is_first_sight = False
        self.num_steps = 0
        self.num_planned = 0
        self._shape: StepShape | None = None
        self._seen: set[int] = set()
        self._last_of: dict[str, PlanEntry] = {}

    @property
    def _family(self) -> ShapeFamily | None:
        """That of the coming step, once some of it were recorded."""
        return self.families.get(self._shape.family) if self._shape is not None else None

    def choose(
        self, shape: StepShape, plainly_on: Hardware | None = None, *, is_exact: bool = False, may_wait: bool = True
    ) -> PlanEntry:
        """The specialization of the step that is about to begin.

        Args:
            shape: What it is known by.
            plainly_on: Where a step of a new shape may keep everything, if there is ample room; None for nowhere.
            is_exact: Whether it must not be one for larger sizes, too.
            may_wait: Whether others may stand for a shape that was recorded, as long as a plan of its own does not pay.
        """
        self._shape, num_before = shape, len(self.entries)
        self.key, entry = shape.signature, self.entries.get(shape.signature)
        family = self._family
        if family is not None and not is_exact:
            family.plain.begin_step()
        is_new = (entry is None or not entry.is_known) and not _num_recording
        if is_new and family is not None and plainly_on is not None and family.has_ample_room_for(shape, plainly_on):
            self.key = f"{shape.family} with ample room"
            entry = self.entries.get(self.key)
            if entry is None:
                entry = self.entries[self.key] = PlanEntry.with_ample_room()
            return self._chosen(entry, shape, num_before, is_exact=is_exact)
        if not _num_recording and (aligned := self._aligned(shape, is_exact=is_exact)) is not None:
            entry = aligned
        if not _num_recording and (entry is None or (may_wait and self._may_wait(entry, shape))):
            extrapolated = self._extrapolated(shape, is_exact=is_exact)
            if entry is not None and extrapolated is not None:
                entry.made.lost_seconds += lost_seconds(extrapolated.shown_plan)
            entry = extrapolated or entry
        if entry is None:
            entry = self.entries.setdefault(shape.signature, PlanEntry())
        return self._chosen(entry, shape, num_before, is_exact=is_exact)

    def _chosen(self, entry: PlanEntry, shape: StepShape, num_before: int, *, is_exact: bool) -> PlanEntry:
        """Have the coming step be of a specialization."""
        self.entries.move_to_end(self.key)
        entry.input_shapes = shape.shapes
        begin_step(entry)
        is_new = (key := hash(shape.signature)) not in self._seen and len(self._seen) < _MAX_SHAPES
        if is_new:
            self._seen.add(key)
            is_planned = (entry.serves_many or entry.has_ample_room) and entry.phase == "planned"
            self.figures.num_shapes += 1
            self.figures.num_at_first_sight += is_planned
        self.is_first_sight = self.is_first_sight if is_exact else is_new
        self.entry = entry
        if shape.family in self.families:
            self.families.move_to_end(shape.family)
            if not entry.has_ample_room:  # whose steps show nothing
                self._last_of[shape.family] = entry
        if len(self.entries) > num_before:
            self._drop_entries()
        return entry

    def _may_wait(self, entry: PlanEntry, shape: StepShape) -> bool:
        """Whether a recorded shape is planned as others of its family are: one of its own does not pay yet."""
        family = self.families.get(shape.family)
        if family is None or entry.phase != "verifying" or pays(entry.made.lost_seconds, family.changes.search_seconds):
            return False
        return family.predicts(shape.signature)

    def _extrapolated(self, shape: StepShape, *, is_exact: bool) -> PlanEntry | None:
        """The specialization that serves a shape that was not recorded; None where nothing predicts it."""
        family = self.families.get(shape.family)
        if family is None:
            return None
        extrapolated = family.find(shape.sizes, signature=shape.signature, is_exact=is_exact)
        if extrapolated is None:
            return None
        if not is_exact:
            extrapolated = self._of_larger(family, shape, extrapolated)
        entry = self.entries.get(extrapolated.key)
        bucket = entry.source if entry is not None else None
        if entry is None or not isinstance(bucket, ShapeBucket) or bucket.version != family.version:
            for signature in family.alike:
                if (sample := self.entries.get(signature)) is not None:
                    family.take_over(signature, sample.verified, sample.mismatched, sample.shortfall_bytes)
            entry = self.entries[extrapolated.key] = PlanEntry.in_bucket(
                family, extrapolated, self._last_of.get(shape.family)
            )
            bucket = entry.source
        assert isinstance(bucket, ShapeBucket)
        bucket.extrapolated, self.key = extrapolated, extrapolated.key
        return entry

    def _of_larger(self, family: ShapeFamily, shape: StepShape, extrapolated: Extrapolated) -> Extrapolated:
        """How a shape is planned for: as larger ones are, as long as a plan of its own bucket does not pay."""
        entry = self.entries.get(extrapolated.key)
        if family.hasty_seconds is None or (entry is not None and entry.shown_plan is not None):
            return extrapolated
        larger = family.find(shape.sizes, signature=shape.signature, is_coarse=True)
        if larger is None or larger.key == extrapolated.key or family.is_too_large(larger.key):
            return extrapolated
        known = self.entries.get(larger.key)
        plan = known.shown_plan if known is not None else None
        if pays(max(family.step_seconds, family.lost_seconds.get(extrapolated.key, 0.0)), family.hasty_seconds):
            return extrapolated
        family.note_loss(extrapolated.key, lost_seconds(plan))
        return larger

    def _aligned(self, shape: StepShape, *, is_exact: bool) -> PlanEntry | None:
        """The specialization that serves a shape where structures change along with sizes; None where they do not.

        What is clearly larger in any way than what was recorded is recorded first.

        Args:
            shape: The shape.
            is_exact: Whether the specialization must not be one for clearly larger sizes, too.
        """
        family = self.families.get(shape.family)
        if family is None or not (family.changes.aligns and len(family.changes.variants)):
            return None
        if not family.has_as_large(shape.sizes):
            unknown = self.entries.setdefault(shape.signature, PlanEntry())
            if unknown.phase != "recording":
                record_again(unknown)
            return unknown
        actual, like = family.changes.variants.size_of(shape.shapes), self._last_of.get(shape.family)
        for grain in (_FINE_GRAIN,) if is_exact or actual > 1 else (_GRAIN, _FINE_GRAIN):
            size = _size_above(actual, grain)
            self.key = f"{shape.family} up to {size:.4f}"
            entry = self.entries.get(self.key)
            if entry is None or entry.changes is not family.changes or entry.superset is None:
                usable_bytes = entry.usable_bytes if entry is not None else None
                entry = self.entries[self.key] = PlanEntry.spanning(family.changes, size, like)
                entry.usable_bytes = usable_bytes
            superset = entry.superset
            if superset is not None and not superset.is_up_to_date and entry.phase == "planned":
                align(entry)
            if not family.is_too_large(self.key):
                break
        return entry

    @property
    def has_ample_room(self) -> bool:
        """Whether the budget is several times what steps like the coming one have needed so far."""
        family = self._family
        return self.entry.plain.is_ample or (family is not None and family.plain.is_ample)

    def note_too_large(self) -> None:
        """No plan for the chosen specialization is within the budget, where that is for sizes that are larger, too."""
        if (family := self._family) is not None and (self.entry.spans_sizes or self.entry.source.is_coarse):
            family.note_too_large(self.key)

    def recorded(self, shape: StepShape) -> PlanEntry | None:
        """The specialization that was recorded with the coming step's shape, if there is one; it is of that then."""
        entry = self.entries.get(shape.signature)
        if entry is None or entry.graph is None:
            return None
        self.key, entry.input_shapes = shape.signature, shape.shapes
        self.entries.move_to_end(self.key)
        self.entry = self._last_of[shape.family] = entry
        return entry

    def record(self, shape: StepShape) -> PlanEntry:
        """The specialization of the coming step, which is to be recorded though others could predict it."""
        self.key = shape.signature
        entry = PlanEntry(input_shapes=shape.shapes)
        self.entry = self._last_of[shape.family] = self.entries[shape.signature] = entry
        return self.entry

    def was(self, shape: StepShape, *, is_recorded: bool) -> None:
        """The step that has ended was of another shape than it was taken to be.

        Args:
            shape: That.
            is_recorded: Whether it was recorded: what was is known by that.
        """
        if not is_recorded:
            return
        self.entries.pop(self.key, None)
        self.key, self._shape = shape.signature, shape
        known = self.entries.get(self.key)
        if known is not None and known.graph is not None:  # and perhaps a plan, too
            self.entry = known
        else:
            self.entry.input_shapes = shape.shapes
            self.entries[self.key] = self.entry

    def learn_shape(self, *, has_deviated: bool, astray_bytes: int | None = None) -> None:
        """A step has ended: let others of its family be planned by it, if it was recorded or measured.

        Args:
            has_deviated: Whether it left its plan.
            astray_bytes: What it saved that the plan for another structure did not have; None where it had its own.
        """
        shape, family, entry = self._shape, self._family, self.entry
        self.figures.num_deviations += has_deviated
        if astray_bytes is not None:
            self.figures.num_aligned += 1
            self.figures.astray_bytes += astray_bytes
        if family is not None:
            if family.plain.must_watch and not entry.has_ample_room:
                family.plain.watched()
            family.gradients = family.gradients.or_more(entry.baseline.gradients)
        if family is not None and not entry.spans_sizes and has_deviated:
            family.changes.deviated()
        elif family is not None and self.phase == "planned" and astray_bytes is None:
            family.changes.followed()
        if shape is not None and entry.family is not None:
            if has_deviated:
                entry.family.step_left_its_plan(shape.signature)
            elif entry.made.is_over:
                entry.made.is_over = False
                entry.family.step_was_over(shape.signature)
        if shape is None or entry.graph is None or entry.serves_many:
            return
        if self.phase in ("recording", "verifying", "measuring"):
            family = self.families.setdefault(shape.family, ShapeFamily(shape.family))
            family.gradients = family.gradients.or_more(entry.baseline.gradients)
            self._last_of[shape.family] = entry
            if self.phase == "recording":
                self.note_baseline(entry.graph.extra_bytes)
                family.learn_plain(shape.shapes, entry.plain)
            else:
                family.dropping.take(entry.baseline.dropping)
            family.learn(shape.signature, shape.sizes, entry.graph, entry.baseline.recorded_gradient_bytes)
            if self.phase == "recording" and entry.changes.variants.latest is not None:
                family.changes.variants.learn(entry.changes.variants.latest)
                if family.varies:
                    family.changes.begin_aligning()
            self._drop_families()
        elif family is not None:
            family.take_over(shape.signature, entry.verified, entry.mismatched, entry.shortfall_bytes)

    def note_baseline(self, num_bytes: int) -> None:
        """Tell the family of the chosen one what is on the device beside its steps: all of them have that."""
        if (family := self._family) is not None:
            family.baseline_bytes = num_bytes

    def _drop_families(self) -> None:
        for name in _unused_for_longest(self.families, _bytes_of_family, but=next(reversed(self.families))):
            del self.families[name]
            self._last_of.pop(name, None)

    def _drop_entries(self) -> None:
        for key in _unused_for_longest(self.entries, _bytes_of, but=self.key):
            del self.entries[key]

    def state_dict(self) -> dict[str, Any]:
        """The recorded specializations that have a plan, and what families are known by, as JSON-able data."""
        plans = [
            {**_row_of(signature, entry.graph, entry.baseline.recorded_gradient_bytes), "plan": plan.to_json()}
            for signature, entry in self.entries.items()
            if entry.graph is not None and (plan := entry.lasting_plan) is not None
        ]
        families = []
        for name, family in self.families.items():
            samples = [
                {**_row_of(signature, sample.graph, sample.gradient_bytes), "sizes": list(sample.sizes)}
                for signature, sample in family.samples.items()
            ]
            if len(samples) > 1:
                families.append({"family": name, "samples": samples})
        return {"schema": _SCHEMA, "plans": plans, "families": families, "custom_ops": custom_ops.to_rows()}

    def load_state_dict(self, state: Any, policy: str, budget_bytes: int | None) -> None:
        """Read specializations; those planned for another policy or budget are planned anew.

        Raises:
            PlanError: The state is malformed.
        """
        if not isinstance(state, dict) or state.get("schema") != _SCHEMA:
            raise PlanError(f"not a state of this version of the memory plugin: {str(state)[:80]!r}")
        entries, samples = {}, []
        lengths = {name: len(s.sizes) for name, family in self.families.items() for s in family.samples.values()}
        try:
            for row in state["plans"]:
                signature, graph, gradient_bytes = _step_of(row)
                plan = MemoryPlan.from_json(_text_of(row, "plan"))
                fits = plan.policy == policy and plan.budget_bytes == budget_bytes
                entries[signature] = PlanEntry.restored(graph, plan if fits else None, gradient_bytes)
            for family in state.get("families", ()):
                name = _text_of(family, "family")
                for row in family["samples"]:
                    signature, graph, gradient_bytes = _step_of(row)
                    sizes = tuple(map(_number, row["sizes"]))
                    if not sizes or len(sizes) != lengths.setdefault(name, len(sizes)):
                        raise ValueError("shapes of one family have as many sizes each")
                    samples.append((name, signature, sizes, graph, gradient_bytes))
            standings = custom_ops.from_rows(state.get("custom_ops", []))
        except PlanError:
            raise
        except (KeyError, TypeError, ValueError) as error:
            why = error if isinstance(error, ValueError) else repr(error)
            raise PlanError(f"the state of the memory plugin is malformed: {why}") from None
        custom_ops.learn(standings)
        self.entries.update(entries)
        for name, signature, sizes, graph, gradient_bytes in samples:
            self.families.setdefault(name, ShapeFamily(name)).learn(signature, sizes, graph, gradient_bytes)

    def forget(self, keep: Collection[str]) -> None:
        """Drop the specializations whose signatures are not among those to keep."""
        self.entries = OrderedDict((key, entry) for key, entry in self.entries.items() if key in keep)
        for family in self.families.values():
            for signature in list(family.samples):
                if signature not in keep:
                    family.forget(signature)
            if not family.samples:
                family.changes = StructureChanges(spans_sizes=True)
        self._last_of.clear()
        if self.key not in self.entries:
            self.key, self.entry, self.phase = "", PlanEntry(), "idle"

    def begin_step(self) -> None:
        """A step of the chosen specialization begins."""
        self.phase = self.entry.phase
        self.num_steps += 1
        self.entry.seen.num_steps += 1
        self.num_planned += self.phase in ("verifying", "measuring", "planned")

    @property
    def neediest(self) -> PlanEntry:
        """The specialization that needs most with everything kept, of those that ran.

        The last one, too, where it needs as much. Where none has a plan, the last one, or that of the recorded ones
        which saves most, where the last one was not to be recorded.
        """
        ran = [entry for entry in (self.entry, *self.entries.values()) if entry.seen.num_steps]
        planned = [(plan.plain_peak_bytes, entry) for entry in ran if (plan := entry.shown_plan) is not None]
        planned = [found for found in planned if not found[1].source.is_coarse] or planned
        if planned:
            return max(planned, key=operator.itemgetter(0))[1]
        recorded = [entry for entry in ran if entry.graph is not None] if self.entry.has_ample_room else []
        return max(recorded, key=operator.attrgetter("saved_bytes"), default=self.entry)

    @property
    def replans(self) -> dict[Reason, int]:
        """Final plans that were given up, of all specializations, by why."""
        return dict(sum((entry.made.replans for entry in self.entries.values()), Counter()))

    def others_than(self, entry: PlanEntry) -> list[PlanEntry]:
        """The other specializations that ran under a plan, by how many steps they had."""
        found = [o for o in self.entries.values() if o is not entry and o.seen.num_steps and o.shown_plan is not None]
        return sorted(found, key=lambda entry: -entry.seen.num_steps)
