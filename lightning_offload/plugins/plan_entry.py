"""The life of a plan: a step's shape is recorded, planned, verified, measured, planned once more, and then run.

Step 1 of a new shape runs under the floor policy and is recorded. Step 2 runs under the first plan, its
replays are verified; step 3 is measured. What was measured (op times, the peak) and what was mismatched goes
into the final plan, which is in force from step 4 on. What becomes of a shape whose steps leave their plan is up to
:mod:`~lightning_offload.plugins.structure_changes`; *unplanned* steps run under the floor policy, or plainly where that
is known to fit.

The budget is a promise. What is on the device beside the step is counted before each plan is made, and again when
it grows. By how much a measured peak exceeded the predicted one (:mod:`~lightning_offload.plugins.feedback`) is a
margin of the plans made afterwards; where a budget has no room for it, that is an error while the plan is being found,
and one warning once it was in force.

A kind of step is known by its signature: the shapes and types of its inputs, and autocast. Kinds that differ in sizes
alone are a family (:mod:`~lightning_offload.plugins.shape_families`): once three of them were recorded, others can be
*derived*, and planned from their first step on. Graphs and plans go into checkpoints as JSON-able data, and come back
from there; what is derived is derived again.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection
from typing import Literal

import torch

from lightning_offload.capture.live import Census, LiveBytes
from lightning_offload.capture.recorder import Recorder
from lightning_offload.errors import BudgetInfeasibleError
from lightning_offload.graph.device_spec import DeviceSpec
from lightning_offload.graph.host_layout import stored_bytes
from lightning_offload.graph.memory_plan import MemoryPlan
from lightning_offload.graph.step_graph import Op, StepGraph
from lightning_offload.planning.family import FamilyPlanner
from lightning_offload.planning.planner import beside
from lightning_offload.planning.step_model import Figures, with_lifetimes_of
from lightning_offload.plugins.cadence import Cadence, HookShedding
from lightning_offload.plugins.pace import Expected, Pace, StepTimes
from lightning_offload.plugins.plain_steps import PlainNeed
from lightning_offload.plugins.replanning import Corrections
from lightning_offload.plugins.resizing import Shapes
from lightning_offload.plugins.shape_families import Derived, ShapeFamily
from lightning_offload.plugins.step_variants import Variant
from lightning_offload.plugins.structure_changes import Next, StructureChanges
from lightning_offload.plugins.touched import Touched
from lightning_offload.runtime.fallback import SupersetRule
from lightning_offload.runtime.program import Program, compile_plan
from lightning_offload.tensors.saved_forms import SavedForm
from lightning_offload.units import format_budget_exactly, format_bytes

_log = logging.getLogger(__name__)
_MAX_SURPRISES = 3
_NUM_FIRST_OF_SIZE = 3  # steps under a plan for several sizes that are counted, whatever others were
_MUCH_LESS = 0.02  # of the budget: what frees it is worth another plan
_SLIGHTLY_OVER = 0.001  # of the budget: a list of losses grows by that, and ends no training that runs


Phase = Literal["idle", "recording", "verifying", "measuring", "planned", "unplanned"]


@dataclasses.dataclass(slots=True)
class PlanEntry:
    """What is known of one shape of step.

    Attributes:
        phase: What its next step does.
        graph: The recorded step.
        touched: The persistent storages that it touches.
        headroom_bytes: What the plan in force leaves free because it is growing.
        program: The plan in force, compiled.
        state_version: Version of the persistent state that the plan was made for.
        shortfall_bytes: By how much measured peaks exceeded predicted ones.
        mismatched: Storages that are not recomputed any more.
        spec: The device that the plan in force was made for.
        is_seen_by_core: Whether the native core saw the recorded step; None where none was recorded.
        hardware_version: Version of the hardware that it was made for.
        usable_bytes: Device memory that there turned out to be, after running out of it.
        corrections: Plans that were made again for what steps under them showed.
        pace: What steps under the plan in force took, on a host that computes.
        recorded_gradient_bytes: Gradients of earlier steps that the recorded step accumulated into.
        bare_bytes: What the recorded step needed beyond what was there before, gradients of earlier steps aside, with
            all that it saved swapped out; None if some stayed, or where that is not known.
        differs: Whether a recording was of another structure than a larger one, whose lifetimes it was to have.
        plain: What its steps need where they keep everything.
        verified: Storages whose replays were verified.
        takes_data: Whether its steps take ``Tensor.data`` of activations, so that their ops must be seen.
        hooks: Which steps that keep everything go without hooks.
        num_surprises: Steps in which backward wrote what the plan counts on.
        num_planned: Steps under a plan, or unplanned.
        cadence: Which of them have their memory counted.
        is_over: Whether a step under the final plan was measured above the budget.
        was_restored: Whether its graph is from an earlier run: with DDP's buckets in the layout that they come to have.
        is_beside_known: Whether what is on the device beside its steps was counted, since the last recording.
        swapped_bytes: Saved bytes that left the device in the last step without a plan of its own.
        stayed_bytes: Saved bytes that did not.
        measured_peak_bytes: Peak of the last measured step, in total and by phase.
        family: Those that differ from it in sizes alone, where it was derived from them; None for a recorded one.
        derived: How it was.
        figures: What of a derived step depends on sizes.
        planner: What plans it.
        family_version: That of the family when it was derived.
        superseded: The last plan that was given up for what steps under it showed, until there is another.
        seen_by_op: The peak before each op, of the last step under the plan in force that was measured.
        lost_seconds: What the steps of a derived kind took beyond plain ones, by prediction.
        is_searched: Whether a plan for a derived kind was searched for thoroughly, once.
        must_search: Whether the next one is.
        is_first_sight: Whether the shape of the coming step is new.
        num_waits: Steps for which another plan was used before it was planned by itself.
        timed_ops: Ops of a derived kind with their own durations, once they were asked for.
        forms: By pack of a plan that steps of other structures follow: what is saved.
        changes: How its structure changes.
        guesses_margin: Whether plans for other structures leave room for tensors that are larger than any seen.
        size: What it is planned for, where it serves steps of several sizes whose structure changes; else 1.
        is_too_large: Whether there was no plan for that size: smaller ones are planned by themselves.
        varying_share: Which part of what the widest recorded structure saves varies with the size.
        aligned_version: Version of the recorded structures that this was chosen from.
        given: The shapes of the tensors that the coming step is given.
        given_plan: The plan that a user made for it, while that is followed; None for none.
        is_step_given: Whether its graph came with that, and was recorded elsewhere.
        has_left_given: Whether it was not followed.
    """

    phase: Phase = "recording"
    graph: StepGraph | None = None
    touched: Touched = dataclasses.field(default_factory=Touched)
    headroom_bytes: int = 0
    program: Program | None = None
    is_seen_by_core: bool | None = None
    state_version: int = -1
    shortfall_bytes: int = 0
    mismatched: set[int] = dataclasses.field(default_factory=set)
    spec: DeviceSpec | None = None
    hardware_version: int = -1
    usable_bytes: int | None = None
    corrections: Corrections = dataclasses.field(default_factory=Corrections)
    pace: Pace = dataclasses.field(default_factory=Pace)
    recorded_gradient_bytes: int = 0
    bare_bytes: int | None = None
    differs: bool = False
    old_gradient_bytes: int = 0
    accumulated_bytes: int = 0
    plain: PlainNeed = dataclasses.field(default_factory=PlainNeed)
    verified: set[int] = dataclasses.field(default_factory=set)
    takes_data: bool = False
    hooks: HookShedding = dataclasses.field(default_factory=HookShedding)
    num_surprises: int = 0
    num_planned: int = 0
    cadence: Cadence = dataclasses.field(default_factory=Cadence)
    is_over: bool = False
    was_restored: bool = False
    is_beside_known: bool = False
    swapped_bytes: int = 0
    stayed_bytes: int = 0
    measured_peak_bytes: int | None = None
    forward_peak_bytes: int | None = None
    backward_peak_bytes: int | None = None
    family: ShapeFamily | None = None
    derived: Derived | None = None
    figures: Figures | None = None
    planner: FamilyPlanner | None = None
    family_version: int = -1
    superseded: MemoryPlan | None = None
    seen_by_op: tuple[int, ...] = ()
    lost_seconds: float = 0.0
    is_searched: bool = False
    must_search: bool = False
    is_first_sight: bool = False
    num_waits: int = 0
    timed_ops: tuple[Op, ...] | None = None
    forms: tuple[SavedForm, ...] = ()
    changes: StructureChanges = dataclasses.field(default_factory=StructureChanges)
    guesses_margin: bool = True
    size: float = 1.0
    is_too_large: bool = False
    varying_share: float = 0.0
    aligned_version: int = 0
    given: Shapes = ()
    given_plan: MemoryPlan | None = None
    is_step_given: bool = False
    has_left_given: bool = False

    @property
    def plan(self) -> MemoryPlan | None:
        """The plan in force."""
        return self.program.plan if self.program is not None else None

    @property
    def margin_bytes(self) -> int:
        """What the plan in force counts beyond the graph."""
        return self.shortfall_bytes + self.headroom_bytes

    @property
    def saved_bytes(self) -> int:
        """What the storages that the step saves and made take on a lower tier: the most that any plan could swap."""
        if self.graph is None:
            return 0
        saved = {self.graph.values[save.value].storage for save in self.graph.saves}
        sizes = (self.graph.storages[s] for s in saved)
        return sum(stored_bytes(storage.num_bytes) for storage in sizes if not storage.is_persistent)

    @property
    def must_verify(self) -> bool:
        """Whether the plan recomputes a storage whose replay was not verified yet."""
        if self.program is None:
            return False
        recomputed = {s for s, d in self.program.decisions.items() if d.action == "recompute"}
        return not recomputed <= self.verified

    @classmethod
    def restored(cls, graph: StepGraph, plan: MemoryPlan | None) -> PlanEntry:
        """A kind of step known from an earlier run; planned anew where its plan was for another setting."""
        if plan is None:
            return cls(phase="verifying", graph=graph, was_restored=True)
        return cls(phase="planned", graph=graph, program=compile_plan(graph, plan), was_restored=True)

    @classmethod
    def derive(cls, family: ShapeFamily, derived: Derived, like: PlanEntry | None) -> PlanEntry:
        """A kind of step that was never seen.

        Args:
            family: Kinds that differ from it in sizes alone.
            derived: How it is derived from them.
            like: The one of them that ran last: what is on the device beside its steps is so beside these.
        """
        figures = family.planner.model.figures_at(derived.point)
        made = cls(
            phase="planned",
            graph=family.planner.model.sized(figures),
            verified=family.verified,
            mismatched=family.mismatched,
            family=family,
            derived=derived,
            figures=figures,
            planner=family.planner,
            family_version=family.version,
        )
        made.recorded_gradient_bytes = family.gradient_bytes
        if like is not None and like.graph is not None and made.graph is not None:
            made.graph = dataclasses.replace(made.graph, extra_bytes=family.beside_bytes or 0)
            made.note_gradients(
                max(like.old_gradient_bytes, family.old_gradient_bytes),
                max(like.accumulated_bytes, family.accumulated_bytes),
            )
            made.state_version = like.state_version
            made.takes_data = like.takes_data
        return made

    @classmethod
    def spanning(cls, changes: StructureChanges, size: float, like: PlanEntry | None) -> PlanEntry:
        """A kind of step whose structure changes, and whose sizes do.

        Args:
            changes: What is known of the structures of all sizes.
            size: The largest that it serves.
            like: The one of them that ran last.
        """
        made = cls(phase="planned", changes=changes, size=size)
        made._align()
        if like is not None:
            made.note_gradients(like.old_gradient_bytes, like.accumulated_bytes)
            made.state_version = like.state_version
            made.takes_data = like.takes_data
        return made

    def take_given(self, plan: MemoryPlan, graph: StepGraph) -> None:
        """Follow a plan from the first step on, for a step that was captured elsewhere.

        What is on the device beside the step is counted here, as are gradients of earlier steps where they are more.
        """
        self.phase, self.graph, self.given_plan, self.is_step_given = "planned", graph, plan, True
        self.old_gradient_bytes, self.accumulated_bytes = graph.old_gradient_bytes, graph.accumulated_bytes

    def leave_given(self) -> None:
        """Record the next step in place of a plan that was not made for it."""
        self.given_plan, self.has_left_given = None, True
        if self.is_step_given:
            self.graph, self.is_step_given, self.touched = None, False, Touched()
            self.old_gradient_bytes = self.accumulated_bytes = self.shortfall_bytes = self.headroom_bytes = 0
            self.mismatched.clear()
            self.record_again()

    @property
    def spans_sizes(self) -> bool:
        """Whether it serves steps of several sizes whose structure changes."""
        return self.changes.spans_sizes

    @property
    def is_settling(self) -> bool:
        """Whether the coming step is one of the first ones: up to the second under the final plan."""
        if self.family is not None:
            can_be_counted = self.program is not None and not self.program.is_keep_all
            return self.family.beside_bytes is None or (can_be_counted and self.family.is_due)
        if self.is_aligned and (self.program is None or self._cadence.is_due(is_changing=True, is_next=True)):
            return True
        return self.phase not in ("planned", "unplanned") or self.program is None or self.num_planned < 2

    def is_due_for_measurement(self, *, can_count: bool) -> bool:
        """Whether the coming planned step is one whose peak is counted; cf. :class:`Cadence`.

        Args:
            can_count: Whether there is what counting starts from.
        """
        self.num_planned += 1
        cadence = self._cadence
        cadence.begin_step()
        is_keep_all = self.program is not None and self.program.is_keep_all
        if self.family is not None:
            return self.family.begin_step(can_count=can_count and not is_keep_all)
        if is_keep_all:
            return False
        is_new = self.spans_sizes and self.num_planned <= _NUM_FIRST_OF_SIZE
        is_due = can_count and (is_new or cadence.is_due(is_changing=self.aligns))
        if is_due:
            cadence.counted()
        return is_due

    @property
    def _cadence(self) -> Cadence:
        return self.changes.cadence if self.spans_sizes else self.cadence

    def begin_anew(self) -> None:
        """Steps are under another plan from now on."""
        self.num_planned = self.cadence.num_steps = 0

    def runs_plainly(self, budget_bytes: int | None, device: torch.device) -> bool:
        """Whether there is nothing to do in its steps: all is kept, without a budget or well within it.

        Args:
            budget_bytes: The budget.
            device: Where they run.
        """
        if self.phase == "unplanned":
            return budget_bytes is None or self.plain.fits(device, budget_bytes)
        if self.is_aligned and budget_bytes is not None and self.plain.fits(device, budget_bytes):
            return True
        is_keep_all = self.program is not None and self.program.is_keep_all
        return self.phase != "recording" and is_keep_all and budget_bytes is None

    def note_gradients(self, old_bytes: int, accumulated_bytes: int) -> None:
        """Plan for gradients of earlier steps: those there before forward, those still there in backward."""
        self.old_gradient_bytes = max(self.old_gradient_bytes, old_bytes, accumulated_bytes)
        self.accumulated_bytes = max(self.accumulated_bytes, accumulated_bytes)
        if self.graph is None:
            return
        old = max(0, self.old_gradient_bytes - self.recorded_gradient_bytes)
        accumulated = max(0, self.accumulated_bytes - self.recorded_gradient_bytes)
        if (old, accumulated) != (self.graph.old_gradient_bytes, self.graph.accumulated_bytes):
            self.graph = dataclasses.replace(self.graph, old_gradient_bytes=old, accumulated_bytes=accumulated)
            self.program = None

    def bytes_beside(self, there: Census, gradients: Collection[int], *, has_inputs: bool) -> int | None:
        """What is on the device beside the coming step; cf. :meth:`Touched.bytes_beside`."""
        if self.family is not None and self.graph is not None and has_inputs:
            held_bytes = sum(storage.nbytes() for key, storage in there.items() if key not in gradients)
            return max(0, held_bytes - self._given_bytes)
        if self._counts_given and self.graph is not None and has_inputs:
            held_bytes = sum(storage.nbytes() for key, storage in there.items() if key not in gradients)
            return max(0, held_bytes - self._touched_bytes(self.graph))
        return self.touched.bytes_beside(there, gradients, has_inputs=has_inputs)

    def bytes_beside_of(self, allocated_bytes: int, gradient_bytes: int, *, has_inputs: bool) -> int | None:
        """The same of the allocator's figure."""
        if self.family is not None and self.graph is not None and has_inputs:
            return max(0, allocated_bytes - gradient_bytes - self._given_bytes)
        if self._counts_given and self.graph is not None and has_inputs:
            return max(0, allocated_bytes - gradient_bytes - self._touched_bytes(self.graph))
        taken = self.graph.taken_bytes if self.graph is not None else int
        return self.touched.bytes_beside_of(allocated_bytes, gradient_bytes, taken, has_inputs=has_inputs)

    @property
    def _counts_given(self) -> bool:
        """Whether what its steps touch is known by the captured step alone: none was counted yet."""
        return self.is_step_given and self.touched.known is None

    def _touched_bytes(self, graph: StepGraph) -> int:
        """What a captured step finds on the device and reads or writes."""
        return sum(graph.taken_bytes(storage.num_bytes) for storage in graph.storages if storage.is_persistent)

    @property
    def _given_bytes(self) -> int:
        """What the coming step finds on the device and reads or writes, gradients of earlier steps aside."""
        assert self.graph is not None
        assert self.planner is not None
        assert self.derived is not None
        sizes = self.planner.model.figures_at(self.derived.actual).storage_bytes.tolist()
        given = (size for size, storage in zip(sizes, self.graph.storages, strict=True) if storage.is_persistent)
        return sum(map(self.graph.taken_bytes, given)) - self.recorded_gradient_bytes

    def follow_family(self, budget_bytes: int | None) -> None:
        """Count what steps of the family showed: plan anew where the plan in force has no room for it.

        Args:
            budget_bytes: The budget.
        """
        family = self.family
        if family is None:
            return
        self.note_gradients(family.old_gradient_bytes, family.accumulated_bytes)
        if family.beside_bytes is not None:
            self.note_beside(family.beside_bytes, budget_bytes)
        more_bytes = family.shortfall_bytes - self.shortfall_bytes
        if self.program is None or self.plan is None or more_bytes <= 0:
            return
        if budget_bytes is None or self.plan.predicted_peak_bytes + more_bytes <= budget_bytes:
            self.shortfall_bytes = family.shortfall_bytes
            self.program = dataclasses.replace(self.program, plan=beside(self.plan, more_bytes))
        else:
            self.program = None

    def note_beside(self, num_bytes: int, budget_bytes: int | None) -> None:
        """Count what is on the device beside the step: plan anew where the plan in force has no room for it.

        Where that grows again and again the plan leaves free as much as it grew, so that not every step is planned
        anew.

        Args:
            num_bytes: What is there now.
            budget_bytes: The budget.
        """
        graph, plan = self.graph, self.plan
        self.is_beside_known = graph is not None
        if graph is None or graph.extra_bytes == num_bytes:
            return
        counted_bytes = graph.extra_bytes + self.headroom_bytes
        growth = num_bytes - graph.extra_bytes
        self.graph = dataclasses.replace(graph, extra_bytes=num_bytes)
        self.headroom_bytes = 0
        if self.program is not None and plan is not None and self.phase == "planned":
            more_bytes = num_bytes - counted_bytes
            is_much_less = budget_bytes is not None and -more_bytes > _MUCH_LESS * budget_bytes
            if more_bytes <= 0 and not is_much_less:
                self.headroom_bytes = -more_bytes
                return
            fits = budget_bytes is None or plan.predicted_peak_bytes + more_bytes <= budget_bytes
            if more_bytes > 0 and (fits or self.is_slightly_over(plan.floor_bytes + more_bytes, budget_bytes)):
                self.program = dataclasses.replace(self.program, plan=beside(plan, more_bytes))
                return
            self.headroom_bytes = max(0, growth)
        self.program = None

    def recorded(
        self,
        recorder: Recorder,
        live: LiveBytes | None,
        gradients: Collection[int],
        accumulated_bytes: int,
        *,
        is_typical: bool,
        larger: StepGraph | None = None,
    ) -> None:
        """Take the result of a recording over.

        Args:
            recorder: What recorded the step.
            live: What counted its bytes.
            gradients: Identities of the gradients that were there when it began.
            accumulated_bytes: Gradients of earlier steps that were there in its backward.
            is_typical: Whether later steps will be like it: not the one in which an optimizer makes its state.
            larger: What tells how long storages live, where some stayed that were saved; None where the recording does.
        """
        seen = Touched.seen(live, gradients) if live is not None else self.touched
        self.touched = Touched(recorder.persistent_ids(), seen.known)
        graph = recorder.finish()
        if larger is not None:
            found = with_lifetimes_of(graph, larger)
            if found is None:
                self.differs = True  # it is recorded again, with all swapped out
                return
            graph = found
        self.recorded_gradient_bytes = accumulated_bytes
        if not recorder.num_unpacks or not is_typical:
            if self.changes.failed() == "unplan":
                self.phase = "unplanned"
            return
        self.given_plan, self.is_step_given = None, False
        if self.graph is None or self.graph.digest() != graph.digest():
            self.mismatched.clear()
            self.verified.clear()
        self.graph, self.was_restored, self.is_beside_known = graph, False, False
        self.changes.num_failed = 0
        self.hooks.restart()
        self.program = None
        self.phase = "verifying"
        forms, open_sizes = tuple(recorder.saved_forms), frozenset(recorder.open_sizes)
        self.changes.variants.learn(Variant(graph, forms, open_sizes, self.touched, accumulated_bytes, self.given))
        if self.changes.aligns:
            self._align()
        self.note_gradients(self.old_gradient_bytes, self.recorded_gradient_bytes)

    def _align(self) -> None:
        """Have steps follow the widest of the recorded structures, each as far as it can."""
        widest = self.changes.variants.widest(self.size)
        self.phase, self.program = "planned", None
        self.graph, self.forms, self.aligned_version = widest.graph, widest.route, self.changes.variants.version
        self.touched, self.recorded_gradient_bytes = widest.touched, widest.gradient_bytes
        self.is_too_large = False
        self.is_beside_known, self.varying_share = False, widest.varying_share if self.spans_sizes else 0.0
        self.begin_anew()
        if self.guesses_margin:
            self.shortfall_bytes = max(self.shortfall_bytes, widest.largest_open_bytes)
        self.mismatched.clear()
        self.verified.clear()
        self.note_gradients(self.old_gradient_bytes, self.accumulated_bytes)

    def follow_other_sizes(self) -> None:
        """Take over what steps of other sizes have shown since, where structures change along with these."""
        if self.aligned_version != self.changes.variants.version and self.phase == "planned":
            self._align()
        more_bytes = self.changes.margin_at(self.size) - self.shortfall_bytes
        if more_bytes > 0:
            self.shortfall_bytes += more_bytes
            self.program = None

    def sheds_hooks(self) -> bool:
        """Whether the coming step, which keeps everything, goes without hooks; not one that serves several shapes."""
        return self.family is None and self.hooks.sheds()

    @property
    def aligns(self) -> bool:
        """Whether its steps follow the plan for another structure, each as far as it can."""
        return self.changes.aligns

    @property
    def is_aligned(self) -> bool:
        """Whether the coming one does: it is not one that is recorded."""
        return self.changes.aligns and self.phase == "planned"

    def deviated(self) -> None:
        """A step left its plan."""
        if self.family is None:
            self.begin_anew()
            self._go_on(self.changes.deviated())

    def followed(self) -> None:
        """A step followed its plan, which makes up for earlier ones that did not."""
        if self.phase == "planned" and not self.aligns:
            self.changes.followed()

    def aligned(self, step: SupersetRule) -> None:
        """A step has followed the plan for another structure as far as it could."""
        self._go_on(self.changes.aligned(step, self.saved_bytes))
        if not self.aligns:
            self.shortfall_bytes = 0  # of another structure

    def begins(self) -> None:
        """A step is about to begin: it may be its turn to be recorded."""
        if self.phase in ("planned", "unplanned"):
            size = self.changes.variants.size_of(self.given) if self.spans_sizes else 1.0
            following = self.changes.begins(is_planned=self.phase == "planned", size=size)
            if following == "record" and self.phase == "unplanned":
                self.shortfall_bytes = 0  # there may be more room
            self._go_on(following)

    def gives_up(self, error: BudgetInfeasibleError) -> bool:
        """Whether a step that cannot be planned is planned otherwise, or not at all: no error ends what ran so far.

        Where structures change, a margin goes that was only guessed, then the next widest one is planned for.

        Args:
            error: Why it cannot be planned.
        """
        was_aligned = self.aligns
        if was_aligned and self.guesses_margin:
            self.guesses_margin = False
            if 0 < self.shortfall_bytes <= self.changes.variants.widest(self.size).largest_open_bytes:
                self.shortfall_bytes = 0  # what steps were seen to need comes before what they might
                self._align()
                return True
        following: Next | None = "unplan" if self.spans_sizes else self.changes.gives_up()  # others may be planned
        if was_aligned:
            self.shortfall_bytes = 0  # of another structure
        self._go_on(following)
        if following == "unplan" and not self.spans_sizes:
            self.graph = None  # of a step that is not like the others
        if was_aligned and following is not None and not self.changes.has_told:
            self.changes.has_told = True
            _log.warning(
                "the model's structure changes from step to step under the same input shapes, and some such steps need "
                "more than the budget under any plan for that: %s; what they save is swapped out unless there is ample "
                "room for it, and no prediction keeps their peak within the budget",
                error,
            )
        return following is not None

    def _go_on(self, following: Next | None) -> None:
        if following == "record":
            self.record_again()
        elif following == "align":
            self._align()
        elif following == "unplan":
            self.phase, self.program = "unplanned", None

    def learn_known(self, live: LiveBytes, gradients: Collection[int]) -> None:
        """Know what the step touches, of a step that was planned in an earlier run."""
        if self.touched.known is None and self.family is None:
            self.touched = Touched.seen(live, gradients)

    def record_again(self) -> None:
        """Record the next step in place of the recorded one: it touched what is not there any more."""
        self.program = None
        self.phase = "recording"

    def surprised(self) -> None:
        """Backward wrote what the plan counts on, which took memory: record a step that does, a few times at most."""
        if self.family is not None:
            return
        self.num_surprises += 1
        if self.num_surprises <= _MAX_SURPRISES and self.phase in ("verifying", "measuring", "planned"):
            self.record_again()

    def demote(self, storage: int) -> None:
        """Plan again without recomputing a storage whose replay did not give the same bits."""
        if storage not in self.mismatched:
            self.mismatched.add(storage)
            self.program = None
            if self.family is not None:
                self.family.version += 1
            elif self.phase != "recording" and not self.is_step_given:
                self.phase = "verifying"

    def paced(self, times: StepTimes) -> None:
        """Note what a planned step took that was not measured otherwise."""
        if self.plan is not None and self.phase == "planned" and self.family is None and not self.aligns:
            self.pace.note(self.plan, times)

    @property
    def expected(self) -> Expected | None:
        """What its steps take under the plan in force, or the last one; None without."""
        plan = self.plan or self.superseded
        if plan is None or self.graph is None or self.spec is None:
            return Expected(plan.predicted_step_seconds, plan.plain_step_seconds) if plan is not None else None
        return self.pace.expected(plan, self.graph, self.spec)

    @property
    def shown_graph(self) -> StepGraph:
        """The step, with the durations of its own ops where it was derived, to be shown."""
        assert self.graph is not None
        if self.planner is None or self.derived is None:
            return self.graph
        if self.timed_ops is None:
            self.timed_ops = self.planner.model.at(self.derived.point).ops
        return dataclasses.replace(self.graph, ops=self.timed_ops)

    def is_slightly_over(self, floor_bytes: int, budget_bytes: int | None) -> bool:
        """Whether training goes on although no plan is within the budget any more; one warning says so.

        Args:
            floor_bytes: The lowest peak of any plan now.
            budget_bytes: The budget.
        """
        if budget_bytes is None or self.phase not in ("measuring", "planned"):
            return False
        if not budget_bytes < floor_bytes <= (1 + _SLIGHTLY_OVER) * budget_bytes:
            return False
        self.warn(budget_bytes, floor_bytes)
        return True

    def warn(self, budget_bytes: int, needed_bytes: int) -> None:
        """Say once that no plan is within the budget any more.

        Args:
            budget_bytes: The budget.
            needed_bytes: The smallest that would do.
        """
        if not self.changes.has_warned:
            self.changes.has_warned = True
            _log.warning(
                "no plan is within the budget of %s any more: steps were measured at up to %s, and the "
                "smallest budget that has room for what they need and for what is on the device beside them is %s "
                "(%d bytes); raise the budget or lower the batch size",
                format_budget_exactly(budget_bytes), format_bytes(self.measured_peak_bytes or 0),
                format_bytes(needed_bytes), needed_bytes,
            )  # fmt: skip
