"""What is known of one specialization: where its plan comes from, the plan in force, and what steps under it showed.

A specialization is known by its signature: the shapes and types of its inputs, and autocast. What becomes of it is up
to :mod:`~lightning_offload.plugins.lifecycle`.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal

import torch

from lightning_offload.accelerators import kind_of
from lightning_offload.capture.departures import Departures
from lightning_offload.graph.device_spec import DeviceSpec
from lightning_offload.graph.host_layout import stored_bytes
from lightning_offload.graph.memory_plan import MemoryPlan
from lightning_offload.graph.step_graph import StepGraph
from lightning_offload.planning.floor import peaks_without_plan
from lightning_offload.planning.planner import with_margin
from lightning_offload.planning.resizing import Shapes
from lightning_offload.plugins.baseline import There
from lightning_offload.plugins.plain_steps import AMPLE, PlainNeed
from lightning_offload.plugins.plan_source import Measured, PlanSource, Recorded, ShapeBucket, Superset
from lightning_offload.plugins.planned_baseline import ExternalStorages, OldGradients, PlannedBaseline
from lightning_offload.plugins.replanning import Corrections, Reason
from lightning_offload.plugins.sampling_schedule import HookElision
from lightning_offload.plugins.shape_families import Extrapolated, ShapeFamily
from lightning_offload.plugins.step_time_estimate import Expected, StepTimeEstimate
from lightning_offload.plugins.structure_changes import StructureChanges
from lightning_offload.runtime.program import Program, compile_plan
from lightning_offload.tensors import custom_ops
from lightning_offload.units import format_budget_exactly, format_bytes

Phase = Literal["idle", "recording", "verifying", "measuring", "planned", "unplanned"]
"""What a step does, in words; :mod:`~lightning_offload.plugins.lifecycle` says what may follow on what."""

_log = logging.getLogger(__name__)
_MUCH_LESS = 0.02  # of the budget: what frees it is worth another plan
_SLIGHTLY_OVER = 0.001  # of the budget: a list of losses grows by that, and ends no training that runs


@dataclasses.dataclass(slots=True)
class StepFigures:
    """What the last steps of a specialization took and needed.

    Attributes:
        num_steps: Its steps so far.
        measured_peak_bytes: Peak of the last measured step, in total and by phase.
        swapped_bytes: Saved bytes that left the device in the last step without a plan of its own.
        stayed_bytes: Saved bytes that did not.
        step_seconds: What its last timed step took, if there was one.
        stall_seconds: The part of that in which compute waited for copies.
        step_time_estimate: What steps under the plan in force took, on a host that computes.
    """

    num_steps: int = 0
    measured_peak_bytes: int | None = None
    forward_peak_bytes: int | None = None
    backward_peak_bytes: int | None = None
    swapped_bytes: int = 0
    stayed_bytes: int = 0
    step_seconds: float | None = None
    stall_seconds: float = 0.0
    step_time_estimate: StepTimeEstimate = dataclasses.field(default_factory=StepTimeEstimate)


@dataclasses.dataclass(slots=True)
class PlanState:
    """How the plan of a specialization stands.

    Attributes:
        spec: The device that it was made for.
        state_version: Version of the persistent state that it was made for.
        hardware_version: Version of the hardware that it was made for.
        num_steps: Steps under it, or without one.
        last: The plan that was given up last.
        is_last_right: Whether that was for what steps under it showed, and it is not known to have no room, or to be
            wrong; False once another was made.
        is_over: Whether steps under the final plan were measured above the budget.
        is_doubted: Whether one under the plan in force was, so that the next one is measured as well.
        seen_by_op: The peak before each op, of the last step under it that was measured.
        lost_seconds: What the steps under plans that were made in haste took beyond plain ones, by prediction.
        search: Whether the next such plan is searched for thoroughly, or one was; None before that pays.
        peaks: A step without a plan, with its smallest peak and that with everything kept; None before anybody asked.
        replans: How many final plans were given up, by why.
    """

    spec: DeviceSpec | None = None
    state_version: int = -1
    hardware_version: int = -1
    num_steps: int = 0
    last: MemoryPlan | None = None
    is_last_right: bool = False
    is_over: bool = False
    is_doubted: bool = False
    seen_by_op: tuple[int, ...] = ()
    lost_seconds: float = 0.0
    search: Literal["due", "done"] | None = None
    peaks: tuple[StepGraph, tuple[int, int]] | None = None
    replans: Counter[Reason] = dataclasses.field(default_factory=Counter)


@dataclasses.dataclass(slots=True)
class PlanEntry:
    """What is known of one specialization.

    Attributes:
        phase: What its next step does.
        source: Where its plan comes from.
        graph: The step that is planned, with what is on the device beside it; None before there is one.
        external: The persistent storages that it touches.
        was_restored: Whether it is from an earlier run: with DDP's buckets in the layout that they come to have.
        program: The plan in force, compiled; None while there is none.
        made: How that stands.
        baseline: What plans count beside what the step makes.
        seen: What its last steps took and needed.
        changes: How its structure changes.
        verified: Storages whose replays were verified.
        mismatched: Storages that are not recomputed any more.
        shortfall_bytes: By how much measured peaks exceeded predicted ones.
        usable_bytes: Device memory that there turned out to be, after running out of it.
        corrections: Plans that were made again for what steps under them showed.
        hooks: Which steps that keep everything go without hooks; those of a family together.
        takes_data: Whether its steps take ``Tensor.data`` of activations, so that their ops must be seen.
        is_seen_by_core: Whether the native core saw the recorded step; None where none was recorded.
        num_demoted: How many ops were no longer believed when its step was recorded, or was last looked through.
        num_surprises: Steps in which backward wrote what the plan counts on.
        input_shapes: The shapes of the tensors that the coming step is given.
        has_ample_room: Whether it stands for all new shapes, which keep everything: there is room for more than that.
        has_left_imported: Whether a plan that the user gave was not followed.
    """

    phase: Phase = "recording"
    source: PlanSource = dataclasses.field(default_factory=Recorded)
    graph: StepGraph | None = None
    external: ExternalStorages = dataclasses.field(default_factory=ExternalStorages)
    was_restored: bool = False
    program: Program | None = None
    made: PlanState = dataclasses.field(default_factory=PlanState)
    baseline: PlannedBaseline = dataclasses.field(default_factory=PlannedBaseline)
    seen: StepFigures = dataclasses.field(default_factory=StepFigures)
    changes: StructureChanges = dataclasses.field(default_factory=StructureChanges)
    verified: set[int] = dataclasses.field(default_factory=set)
    mismatched: set[int] = dataclasses.field(default_factory=set)
    shortfall_bytes: int = 0
    usable_bytes: int | None = None
    corrections: Corrections = dataclasses.field(default_factory=Corrections)
    hooks: HookElision = dataclasses.field(default_factory=HookElision)
    takes_data: bool = False
    is_seen_by_core: bool | None = None
    num_demoted: int = dataclasses.field(default_factory=lambda: len(custom_ops.demoted()))
    num_surprises: int = 0
    input_shapes: Shapes = ()
    has_ample_room: bool = False
    has_left_imported: bool = False

    # ---- as it begins

    @classmethod
    def restored(cls, graph: StepGraph, plan: MemoryPlan | None, gradient_bytes: int = 0) -> PlanEntry:
        """A specialization known from an earlier run; planned anew where its plan was for another setting.

        Args:
            graph: The step.
            plan: Its plan, if it is to be followed.
            gradient_bytes: Gradients of earlier steps that are among the step's storages.
        """
        program = compile_plan(graph, plan) if plan is not None else None
        phase: Phase = "verifying" if plan is None else "planned"
        made = cls(phase=phase, was_restored=True, graph=graph, program=program)
        made.baseline.gradients = OldGradients.of(graph, gradient_bytes)
        made.baseline.recorded_gradient_bytes = gradient_bytes
        return made

    @classmethod
    def with_ample_room(cls) -> PlanEntry:
        """What stands for all new shapes where these may keep everything."""
        return cls(phase="planned", has_ample_room=True)

    @classmethod
    def in_bucket(cls, family: ShapeFamily, extrapolated: Extrapolated, like: PlanEntry | None) -> PlanEntry:
        """A specialization that was never seen.

        Args:
            family: Kinds that differ from it in sizes alone.
            extrapolated: How it is extrapolated from them.
            like: The one of them that ran last: what is on the device beside its steps is so beside these.
        """
        source = ShapeBucket(family, extrapolated)
        made = cls(
            phase="planned",
            source=source,
            graph=source.step(),
            verified=family.verified,
            mismatched=family.mismatched,
            hooks=family.hooks,
        )
        made.baseline.recorded_gradient_bytes = source.gradient_bytes
        made.baseline.dropping = family.dropping
        if like is not None and like.graph is not None and made.graph is not None:
            made.graph = made.baseline.with_extra(made.graph, family.baseline_bytes or 0)
            made._be_like(like)
            made.note_gradients(family.gradients)
        return made

    @classmethod
    def spanning(cls, changes: StructureChanges, size: float, like: PlanEntry | None) -> PlanEntry:
        """A specialization whose structure changes, and whose sizes do.

        Args:
            changes: What is known of the structures of all sizes.
            size: The largest that it serves.
            like: The one of them that ran last.
        """
        made = cls(phase="planned", changes=changes)
        made.follow(Superset(changes, size))
        if like is not None:
            made._be_like(like)
            made.baseline.dropping = dataclasses.replace(like.baseline.dropping)
        return made

    def _be_like(self, like: PlanEntry) -> None:
        self.note_gradients(like.baseline.gradients)
        self.made.state_version = like.made.state_version
        self.takes_data = like.takes_data

    def follow(self, source: Superset) -> None:
        """Plan for the widest of its structures from now on."""
        self.source, self.graph, self.external = source, source.step, source.external
        self.replan("structure")
        self.baseline.recorded_gradient_bytes, self.baseline.is_known = source.gradient_bytes, False
        self.begin_anew()
        if source.guesses_margin:
            self.shortfall_bytes = max(self.shortfall_bytes, source.guess_bytes)
        self.mismatched.clear()
        self.verified.clear()
        self.note_gradients(self.baseline.gradients)

    def begin_anew(self) -> None:
        """Steps are under another plan from now on."""
        self.made.num_steps = 0
        self.source.begin_anew()

    # ---- what it is

    @property
    def plan(self) -> MemoryPlan | None:
        """The plan in force."""
        return self.program.plan if self.program is not None else None

    @property
    def shown_plan(self) -> MemoryPlan | None:
        """The plan in force, or the last one; None before there was one."""
        return self.plan or self.made.last

    @property
    def shown_graph(self) -> StepGraph:
        """The step, with the durations of its own ops where it was extrapolated, to be shown."""
        assert self.graph is not None
        return self.source.with_own_times(self.graph)

    @property
    def is_known(self) -> bool:
        """Whether it was recorded, or is planned as others are."""
        return self.graph is not None or self.phase == "planned"

    @property
    def lasting_plan(self) -> MemoryPlan | None:
        """What is worth keeping from one run to the next: the plan in force, or one given up for what steps took."""
        source = self.source
        if self.graph is None or not source.is_own or self.spans_sizes or source.is_captured:
            return None  # whoever goes on gives a captured one again
        is_of_this = self.phase in ("verifying", "measuring", "planned")
        needed_more = self.made.is_over or self.usable_bytes is not None
        return self.plan or (self.made.last if self.made.is_last_right and is_of_this and not needed_more else None)

    @property
    def family(self) -> ShapeFamily | None:
        """The specializations that it was extrapolated from; None for one that was not."""
        return self.source.family if isinstance(self.source, ShapeBucket) else None

    @property
    def superset(self) -> Superset | None:
        """What its steps follow as far as they can; None where they have a plan of their own."""
        return self.source if isinstance(self.source, Superset) else None

    @property
    def is_aligned(self) -> bool:
        """Whether the coming step follows the plan for another structure: it is not one that is recorded."""
        return not self.source.follows_ops and self.phase == "planned"

    @property
    def shared_changes(self) -> StructureChanges:
        """What is known of how the structure changes of all steps that are planned alike."""
        return self.family.changes if self.family is not None else self.changes

    @property
    def has_deviated(self) -> bool:
        """Whether such steps left their plan lately: the coming one may, too."""
        return self.shared_changes.num_deviations > 0

    @property
    def spans_sizes(self) -> bool:
        """Whether it serves steps of several sizes whose structure changes."""
        return self.changes.spans_sizes

    @property
    def serves_many(self) -> bool:
        """Whether it serves steps of several sizes, whose structure changes or not."""
        return self.family is not None or self.spans_sizes

    @property
    def plain(self) -> PlainNeed:
        """What its steps need where they keep everything."""
        return self.changes.plain

    @property
    def is_keep_all(self) -> bool:
        """Whether there is a plan, by which its steps keep everything."""
        return self.program is not None and self.program.is_keep_all

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
        return self.program is not None and not self.program.recomputed <= self.verified

    @property
    def expected(self) -> Expected | None:
        """What its steps take under the plan in force, or the last one; None without."""
        plan = self.shown_plan
        if plan is None or self.graph is None or self.made.spec is None:
            return Expected(plan.predicted_step_seconds, plan.plain_step_seconds) if plan is not None else None
        return self.seen.step_time_estimate.expected(plan, self.graph, self.made.spec)

    # ---- the coming step

    @property
    def is_settling(self) -> bool:
        """Whether what is beside the coming step is to be counted: one of the first, or one whose peak is."""
        if self.family is not None:
            can_be_counted = self.program is not None and not self.is_keep_all
            return self.family.baseline_bytes is None or (can_be_counted and self.source.must_count())
        if self.is_aligned and self.plain.must_watch:
            return True
        if not self.is_keep_all and self.source.must_count():
            return True
        return self.phase not in ("planned", "unplanned") or self.program is None or self.made.num_steps < 2

    def begins_counted(self, *, can_count: bool) -> bool:
        """The coming step begins: whether its peak is counted, if it is planned.

        Args:
            can_count: Whether there is what counting starts from.
        """
        self.made.num_steps += 1
        keeps_all = self.is_keep_all and not self.is_aligned
        is_counted = can_count and not keeps_all and self.source.must_count()
        self.source.begin_step(is_counted=is_counted)
        return is_counted

    def elides_hooks(self) -> bool:
        """Whether the coming step, which keeps everything, goes without hooks."""
        plan = self.plan
        has_ample_room = (
            plan is not None
            and plan.budget_bytes is not None
            and (AMPLE * plan.predicted_peak_bytes <= plan.budget_bytes)
        )
        return self.hooks.elides(has_ample_room=has_ample_room)

    def runs_plainly(self, budget_bytes: int | None, device: torch.device, policy: str) -> bool:
        """Whether there is nothing to do in its steps: all is kept, without a budget or well within it.

        Args:
            budget_bytes: The budget.
            device: Where they run.
            policy: Who plans: where nothing watches plain steps, what another one than "auto" would do is done.
        """
        if self.has_ample_room:
            return True
        if self.phase == "unplanned":
            return budget_bytes is None or self.plain.fits(device, budget_bytes)
        if self.is_aligned and budget_bytes is not None and (policy == "auto" or kind_of(device).counts_memory):
            is_as_small = not self.spans_sizes or self.changes.variants.size_of(self.input_shapes) <= 1
            return is_as_small and self.plain.fits(device, budget_bytes)
        return self.phase != "recording" and self.is_keep_all and budget_bytes is None

    # ---- memory

    @property
    def margin_bytes(self) -> int:
        """What the plan in force counts beyond the graph."""
        return self.shortfall_bytes + self.baseline.headroom_bytes

    @property
    def unforeseen_bytes(self) -> int:
        """By how much the last measured peak exceeded what was predicted for it, without a margin."""
        assert self.graph is not None
        assert self.plan is not None
        if self.seen.measured_peak_bytes is None:
            return 0
        step = Measured(
            peak_bytes=self.seen.measured_peak_bytes, plan=self.plan, margin_bytes=self.margin_bytes, graph=self.graph,
            device=self.made.spec, input_shapes=self.input_shapes,
        )  # fmt: skip
        return self.source.unforeseen_bytes(step)

    def peaks_without_plan(self, device: DeviceSpec) -> tuple[int, int]:
        """The smallest peak of a recorded step, and the one with everything kept.

        Args:
            device: Where it runs.
        """
        assert self.graph is not None
        known = self.made.peaks
        if known is None or known[0] is not self.graph:
            known = self.made.peaks = self.graph, peaks_without_plan(self.graph, device)
        return known[1]

    def baseline_bytes_with(self, state_bytes: int) -> int:
        """What was counted beside its steps, since the last recording, with as much of the training's state as now."""
        if self.graph is None or not self.baseline.is_known:
            return 0
        grown_bytes = state_bytes - self.baseline.state_bytes if self.baseline.state_bytes is not None else 0
        return self.graph.extra_bytes + grown_bytes

    def baseline_bytes(self, there: There | int, gradients: Mapping[int, int], *, has_inputs: bool) -> int | None:
        """What is on the device beside the coming step; None where that is not known yet.

        Args:
            there: What is on the device, or how much of it the allocator has handed out.
            gradients: Of earlier steps: bytes by identity.
            has_inputs: Whether what the coming step has in place of what is gone is there: as one begins.
        """
        graph, external = self.graph, self.external
        held_bytes = there - sum(gradients.values()) if isinstance(there, int) else there.bytes_but(gradients)
        if external.known is None and has_inputs and graph is not None:
            found_bytes = self.source.found_bytes(graph)
            return max(0, held_bytes - found_bytes) if found_bytes is not None else None
        if not isinstance(there, int):
            return external.baseline_bytes(there, gradients, has_inputs=has_inputs)
        taken = graph.taken_bytes if graph is not None else int
        return external.baseline_bytes_of(held_bytes, taken, has_inputs=has_inputs)

    def note_gradients(self, old: OldGradients) -> None:
        """Plan for gradients of earlier steps, as steps have shown them."""
        self.baseline.learn_gradients(old)
        self._count_gradients()

    def begin_with_gradients(self, gradients: Mapping[int, int]) -> None:
        """Plan for those that a step begins with: bytes by identity."""
        self.baseline.note_gradients(gradients)
        self._count_gradients()

    def _count_gradients(self) -> None:
        if self.graph is not None and (graph := self.baseline.with_gradients(self.graph)) is not self.graph:
            self.graph = graph
            self.replan("gradients")

    def note_baseline(self, num_bytes: int, budget_bytes: int | None) -> None:
        """Count what is on the device beside the step: plan anew where the plan in force has no room for it.

        Where that grows again and again the plan leaves free as much as it grew, so that not every step is planned
        anew.

        Args:
            num_bytes: What is there now.
            budget_bytes: The budget.
        """
        before, plan, baseline = self.graph, self.plan, self.baseline
        baseline.is_known = before is not None
        if before is None:
            return
        graph = baseline.with_extra(before, num_bytes)
        if graph is before and not baseline.is_lower:
            return
        counted_bytes = before.extra_bytes + baseline.headroom_bytes
        growth = num_bytes - before.extra_bytes
        self.graph, baseline.headroom_bytes = graph, 0
        if self.program is not None and plan is not None and self.phase == "planned":
            more_bytes = num_bytes - counted_bytes
            is_much_less = budget_bytes is not None and -more_bytes > _MUCH_LESS * budget_bytes
            is_to_be_given_back = baseline.gives_back(is_much_less=is_much_less)
            if more_bytes <= 0 and not is_to_be_given_back:
                baseline.headroom_bytes = -more_bytes
                return
            fits = budget_bytes is None or plan.predicted_peak_bytes + more_bytes <= budget_bytes
            if more_bytes > 0 and (fits or self.is_slightly_over(plan.floor_bytes + more_bytes, budget_bytes)):
                self.count_more(more_bytes)
                return
            baseline.headroom_bytes = max(0, growth) if more_bytes > 0 else 0
        self.replan("baseline")

    def note_drops(self, drops: Departures, budget_bytes: int | None) -> None:
        """A watched step has shown what it drops of what is on the device beside it.

        Args:
            drops: That.
            budget_bytes: The budget.
        """
        before, was_recorded = self.graph, self.phase == "verifying" and not self.baseline.is_known
        graph = self.baseline.note_drops(drops, before, was_recorded=was_recorded)
        if before is None or graph is None or graph is before:
            return
        more_bytes = sum(d.num_bytes for d in graph.departures) - sum(d.num_bytes for d in before.departures)
        is_little = budget_bytes is None or abs(more_bytes) <= _MUCH_LESS * budget_bytes
        if self.phase == "planned" and self.program is not None and is_little:
            return
        self.graph = graph
        self.replan("baseline")

    def guesses_less(self) -> bool:
        """Whether no plan is refused for what the coming step may drop: what is beside it counts as less now."""
        graph = self.baseline.guess_less(self.graph)
        self.graph = graph or self.graph
        return graph is not None

    def has_ops_among(self, demoted: Sequence[str]) -> bool:
        """Whether its step has ops that are not believed any more; each is told of once."""
        if len(demoted) == self.num_demoted:
            return False
        lately, self.num_demoted = set(demoted[self.num_demoted :]), len(demoted)
        return self.graph is not None and any(op.name in lately for op in self.graph.ops)

    def replan(self, reason: Reason, *, lasts: bool = False) -> None:
        """Give the plan in force up: another one is made when the next step begins.

        Args:
            reason: Why.
            lasts: Whether it is still one for this very step, which a later run may begin with.
        """
        if self.program is not None and self.phase == "planned":
            self.made.replans[reason] += 1
        self.made.is_last_right = lasts and self.program is not None
        self.made.last = self.shown_plan
        self.program = None

    def count_more(self, num_bytes: int) -> None:
        """The plan in force stays, with more memory beside its step."""
        assert self.program is not None
        self.program = dataclasses.replace(self.program, plan=with_margin(self.program.plan, num_bytes))

    def widen_margin(self, more_bytes: int, budget_bytes: int | None) -> bool:
        """Leave so much more free from now on: plan anew where the plan in force has no room for it.

        Args:
            more_bytes: How much more.
            budget_bytes: The budget.

        Returns:
            Whether the plan in force stays.
        """
        self.shortfall_bytes += more_bytes
        fits = self.plan is not None and (
            budget_bytes is None or self.plan.predicted_peak_bytes + more_bytes <= budget_bytes
        )
        if fits:
            self.count_more(more_bytes)
        else:
            self.replan("peak", lasts=True)
        return fits

    def follow_others(self, budget_bytes: int | None) -> None:
        """Count what steps of other sizes showed: plan anew where the plan in force has no room for it.

        Args:
            budget_bytes: The budget.
        """
        if self.family is not None:
            self.note_gradients(self.family.gradients)
            if self.family.baseline_bytes is not None:
                self.note_baseline(self.family.baseline_bytes, budget_bytes)
        more_bytes = self.source.known_margin_bytes - self.shortfall_bytes
        if more_bytes > 0:
            self.widen_margin(more_bytes, budget_bytes)

    def is_slightly_over(self, floor_bytes: int, budget_bytes: int | None) -> bool:
        """Whether training goes on although no plan is within the budget any more; one warning says so.

        Args:
            floor_bytes: The lowest peak of any plan now.
            budget_bytes: The budget.
        """
        if budget_bytes is None or self.phase not in ("measuring", "planned") or self.source.is_coarse:
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
                format_budget_exactly(budget_bytes), format_bytes(self.seen.measured_peak_bytes or 0),
                format_bytes(needed_bytes), needed_bytes,
            )  # fmt: skip
