"""Where the plan for a specialization comes from.

==============  =================================================  ==================================================
source          the step that is planned                           its steps
==============  =================================================  ==================================================
`Recorded`      one of this shape, as it was recorded              follow the plan op by op
`ShapeBucket`   predicted from recorded ones of other sizes        have the same ops, and tensors that are no larger
`Superset`      the widest recorded structure, at a size           follow the plan as far as they can
`Imported`      one that was captured elsewhere, with its plan     follow it where they are alike, or leave it for good
==============  =================================================  ==================================================

A source tells how a plan is made and compiled, what steps under it find on the device and read, which of them are
counted, and by how much one of them needed more than foreseen.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from typing import ClassVar

from typing_extensions import override

from lightning_offload.errors import BudgetInfeasibleError, PlanError
from lightning_offload.graph.device_spec import DeviceSpec
from lightning_offload.graph.memory_plan import MemoryPlan
from lightning_offload.graph.step_graph import Op, StepGraph
from lightning_offload.planning.planner import Make, plan_with_margin, plan_without_ops, with_margin
from lightning_offload.planning.problem import Problem
from lightning_offload.planning.resizing import Shapes
from lightning_offload.planning.trace import simulate_plan
from lightning_offload.plugins.planned_baseline import OldGradients
from lightning_offload.plugins.sampling_schedule import SamplingSchedule
from lightning_offload.plugins.shape_families import Extrapolated, ShapeFamily
from lightning_offload.plugins.structure_changes import StructureChanges
from lightning_offload.runtime.program import Program, compile_plan
from lightning_offload.units import format_bytes

_log = logging.getLogger(__name__)
_OF_ANOTHER_SIZE = 4  # what a plan did not foresee may be by a quarter more at another size


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlanTask:
    """What a plan is asked for.

    Attributes:
        graph: The step, with what is on the device beside it.
        device: What is planned for.
        budget_bytes: Peak of live device bytes allowed, None for no limit.
        usable_bytes: Device memory that there turned out to be, where that is less.
        margin_bytes: What is counted beyond the graph.
        must_fit: Whether a budget that cannot be met raises; the plan with the lowest peak is made otherwise.
        policy: The policy.
        keep: Storages that stay on the device.
        mismatched: Those whose replays did not give the same bits: they are not recomputed.
        mode_seconds: By how much a dispatch mode lengthens the step; None as it is known of others.
        is_provisional: Whether another plan follows soon.
        is_thorough: Whether to search for long where plans are made in haste.
    """

    graph: StepGraph
    device: DeviceSpec
    budget_bytes: int | None
    usable_bytes: int | None = None
    margin_bytes: int = 0
    must_fit: bool = True
    policy: str = "auto"
    keep: frozenset[int] = frozenset()
    mismatched: frozenset[int] = frozenset()
    mode_seconds: float | None = None
    is_provisional: bool = False
    is_thorough: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A step under a plan whose peak was measured.

    Attributes:
        peak_bytes: That.
        plan: The plan.
        margin_bytes: What that counts beyond the graph.
        graph: The step that it was made for.
        device: What it was made for.
        input_shapes: The shapes of the tensors that the step was given.
    """

    peak_bytes: int
    plan: MemoryPlan
    margin_bytes: int
    graph: StepGraph
    device: DeviceSpec | None
    input_shapes: Shapes

    @property
    def foreseen_bytes(self) -> int:
        """What was predicted, without a margin."""
        return self.plan.predicted_peak_bytes - self.margin_bytes


class PlanSource:
    """Where the plan for a specialization comes from.

    Attributes:
        sampling_schedule: Which steps have their memory counted.
    """

    follows_ops: ClassVar[bool] = True
    """Whether its steps have the ops of the planned one."""
    is_own: ClassVar[bool] = True
    """Whether these are its own: of this very shape, so that what they take tells what ops take."""

    def __init__(self) -> None:
        self.sampling_schedule = SamplingSchedule()

    @property
    def is_captured(self) -> bool:
        """Whether the planned step was captured elsewhere, and not recorded here or in an earlier run."""
        return False

    @property
    def is_coarse(self) -> bool:
        """Whether the coming step is planned as much larger ones are: its plan tells little of what it needs."""
        return False

    # ---- plans

    def make(self, task: PlanTask) -> MemoryPlan:
        """Make a plan.

        Raises:
            BudgetInfeasibleError: The budget is below the floor.
            PlanError: One that was given cannot be carried out.
        """
        return self._planned(task, self.with_own_times(task.graph), None)

    def compile(self, graph: StepGraph, plan: MemoryPlan) -> Program:
        """A plan, compiled for its steps.

        Raises:
            BudgetInfeasibleError: It is none that they can follow.
            PlanError: It is for another graph, or recomputes what cannot be.
        """
        return compile_plan(graph, plan)

    def with_own_times(self, graph: StepGraph) -> StepGraph:
        """The planned step, with the durations of its own ops."""
        return graph

    @staticmethod
    def _planned(task: PlanTask, graph: StepGraph, make: Make | None) -> MemoryPlan:
        return plan_with_margin(
            graph,
            task.device,
            task.budget_bytes,
            usable_bytes=task.usable_bytes,
            shortfall_bytes=task.margin_bytes,
            must_fit=task.must_fit,
            make=make,
            mode_seconds=task.mode_seconds,
            policy=task.policy,
            keep=task.keep | task.mismatched,
            is_provisional=task.is_provisional,
        )

    def begin_anew(self) -> None:
        """Steps are under another plan from now on."""
        self.sampling_schedule.begin_anew()

    # ---- memory

    @property
    def known_margin_bytes(self) -> int:
        """What plans leave free, by what steps of other sizes needed beyond what was foreseen."""
        return 0

    def found_bytes(self, graph: StepGraph) -> int | None:
        """What the coming step finds on the device and reads or writes, gradients of earlier steps aside.

        Asked where no storages are known that it touches; None where only these tell.
        """
        return None

    def must_count(self) -> bool:
        """Whether the peak of the coming step is to be counted."""
        return self.sampling_schedule.is_due()

    def begin_step(self, *, is_counted: bool) -> None:
        """The coming step begins, and its peak is counted or not."""
        self.sampling_schedule.begin_step(is_counted=is_counted)

    def unforeseen_bytes(self, step: Measured) -> int:
        """By how much a measured peak exceeds what was predicted for it, without a margin."""
        return max(0, step.peak_bytes - step.foreseen_bytes)


class Recorded(PlanSource):
    """A step of this very shape that was recorded, here or in an earlier run."""


class ShapeBucket(PlanSource):
    """Recorded steps of other sizes, for all sizes up to some.

    Args:
        family: They.
        extrapolated: How the step is extrapolated from them.

    Attributes:
        family: They.
        extrapolated: How the coming step is extrapolated from them.
        version: That of the family when this was.
        gradient_bytes: Gradients of earlier steps that are among the step's storages.
    """

    is_own = False

    def __init__(self, family: ShapeFamily, extrapolated: Extrapolated) -> None:
        super().__init__()
        self.family = family
        self.extrapolated = extrapolated
        self.version = family.version
        self.gradient_bytes = family.gradient_bytes
        self.sampling_schedule = family.changes.sampling_schedule
        self._planner = family.planner
        self._figures = family.planner.model.figures_at(extrapolated.point)
        self._own_ops: tuple[Op, ...] | None = None

    def step(self) -> StepGraph:
        """The planned step, but for the durations of its ops."""
        return self._planner.model.sized(self._figures)

    @property
    @override
    def is_coarse(self) -> bool:
        return self.extrapolated.is_coarse

    @property
    def has_own_ops(self) -> bool:
        """Whether there are ops with durations of their own, which take memory."""
        return self._own_ops is not None

    @override
    def make(self, task: PlanTask) -> MemoryPlan:
        if task.policy != "auto":
            return super().make(task)
        planner, figures = self._planner.keeping(task.keep | task.mismatched), self._figures

        def make(graph: StepGraph, device: DeviceSpec, budget_bytes: int | None) -> MemoryPlan:
            return planner.plan(graph, figures, device, budget_bytes, is_thorough=task.is_thorough)

        return self._planned(task, task.graph, make)

    @override
    def compile(self, graph: StepGraph, plan: MemoryPlan) -> Program:
        return compile_plan(graph, plan, is_bound=True)

    @override
    def begin_anew(self) -> None:
        pass  # plans of other buckets stay

    @override
    def must_count(self) -> bool:
        return self.sampling_schedule.is_due("sizes")

    @override
    def with_own_times(self, graph: StepGraph) -> StepGraph:
        if self._own_ops is None:
            self._own_ops = self._planner.model.at(self.extrapolated.point).ops
        return dataclasses.replace(graph, ops=self._own_ops)

    @property
    @override
    def known_margin_bytes(self) -> int:
        return self.family.shortfall_bytes

    @override
    def found_bytes(self, graph: StepGraph) -> int | None:
        sizes = self._planner.model.figures_at(self.extrapolated.actual).storage_bytes.tolist()
        found = (size for size, storage in zip(sizes, graph.storages, strict=True) if storage.is_persistent)
        return sum(map(graph.taken_bytes, found)) - self.gradient_bytes

    @override
    def unforeseen_bytes(self, step: Measured) -> int:
        if self.extrapolated.actual == self.extrapolated.point or step.device is None:
            return super().unforeseen_bytes(step)
        figures = self._planner.model.figures_at(self.extrapolated.actual)  # it was smaller than what the plan is for
        graph = OldGradients.of(step.graph).on(self._planner.model.sized(figures), 0)
        graph = dataclasses.replace(graph, extra_bytes=step.graph.extra_bytes)
        return max(0, step.peak_bytes - self._planner.peak_bytes(step.plan, graph, figures, step.device))


class Superset(PlanSource):
    """The widest of the structures that steps were recorded with, which each follows as far as it can.

    Args:
        changes: What is known of their structures.
        size: What it is resized to, as a part of the largest, where steps differ in sizes, too.
        guesses_margin: Whether to leave room for tensors that are larger than any seen.

    Attributes:
        step: That.
        external: The persistent storages that it touches.
        gradient_bytes: Gradients of earlier steps that it accumulated into.
        guess_bytes: What is left free for tensors that are larger than any seen.
    """

    follows_ops = is_own = False

    def __init__(self, changes: StructureChanges, size: float = 1.0, *, guesses_margin: bool = True) -> None:
        basis = changes.variants.basis
        widest = changes.variants.widest(size)
        self.size = size
        self.step = widest.graph
        self.external = widest.external
        self.gradient_bytes = widest.gradient_bytes
        self.guesses_margin = guesses_margin
        self.guess_bytes = widest.largest_open_bytes
        self._changes = changes
        self._forms = widest.route
        self._basis = basis
        self._varying_share = widest.varying_share if changes.spans_sizes else 0.0
        self.sampling_schedule = changes.sampling_schedule

    @property
    def is_up_to_date(self) -> bool:
        """Whether nothing was recorded since that changes it."""
        return self._basis.is_same(self._changes.variants.basis)

    @override
    def make(self, task: PlanTask) -> MemoryPlan:
        keep, is_hasty = task.keep | task.mismatched, not task.is_thorough
        make = functools.partial(
            plan_without_ops, policy=task.policy, keep=keep, is_provisional=is_hasty, is_hasty=is_hasty
        )
        return self._planned(task, task.graph, make)

    @override
    def compile(self, graph: StepGraph, plan: MemoryPlan) -> Program:
        try:
            return compile_plan(graph, plan, forms=self._forms)
        except PlanError as error:
            raise BudgetInfeasibleError(  # a policy of its own mind: no training that ran so far ends by that
                f"the policy {plan.policy!r} has no plan that steps of changing structure can follow: {error}",
                budget_bytes=plan.budget_bytes or 0,
                floor_bytes=plan.floor_bytes,
                op=plan.floor_op,
            ) from None

    @override
    def begin_anew(self) -> None:
        if not self._changes.spans_sizes:  # plans for other sizes stay
            super().begin_anew()

    @property
    @override
    def known_margin_bytes(self) -> int:
        return self._changes.margin_at(self.size)

    @override
    def must_count(self) -> bool:
        is_first = self._changes.spans_sizes and self.size not in self._changes.counted_sizes
        return is_first or self.sampling_schedule.is_due("structures") or self._changes.plain.must_watch

    @override
    def begin_step(self, *, is_counted: bool) -> None:
        super().begin_step(is_counted=is_counted)
        if is_counted:
            self._changes.counted_sizes.add(self.size)

    @override
    def unforeseen_bytes(self, step: Measured) -> int:
        if not self._changes.spans_sizes:
            return super().unforeseen_bytes(step)
        larger = max(0.0, self.size / self._changes.variants.size_of(step.input_shapes) - 1)  # those as large need more
        own_bytes = max(0, step.peak_bytes - step.graph.persistent_bytes)
        needed_bytes = step.peak_bytes + int(larger * self._varying_share * own_bytes)
        return max(0, needed_bytes - step.foreseen_bytes)

    def wider_margin(self, needed_bytes: int) -> int:
        """What steps may need beyond what was foreseen, by what one was measured to."""
        return needed_bytes + needed_bytes // _OF_ANOTHER_SIZE if self._changes.spans_sizes else needed_bytes


class Imported(PlanSource):
    """A plan that the user gives.

    The command line writes one and the step beside it, captured on FakeTensors. With its step a plan is in force from
    the first training step on, and followed as far as what it decides about is there
    (:mod:`~lightning_offload.runtime.follow`). Without, it waits for the first recording, and is taken if it is for
    that. Where what is on the device leaves it no room, the step is planned anew within the budget.

    Args:
        plan: The plan.
        step: The step that it was captured with; None where it is for the recorded one.

    Attributes:
        plan: The plan.
        plan_here: The same for the tiers that there are here.
        step: The step.
    """

    def __init__(self, plan: MemoryPlan, step: StepGraph | None = None) -> None:
        super().__init__()
        self.plan = self.plan_here = plan
        self.step = step

    @property
    @override
    def is_captured(self) -> bool:
        return self.step is not None

    @override
    def make(self, task: PlanTask) -> MemoryPlan:
        return self._within(task) or super().make(task)

    def _within(self, task: PlanTask) -> MemoryPlan | None:
        """The plan with what is predicted of it here; None where that is beyond the budget.

        Raises:
            PlanError: It cannot be carried out.
        """
        plan = self.plan_here
        plan.check(task.graph)
        if any(d.storage in task.mismatched for d in plan.decisions if d.action == "recompute"):
            return None
        peak_bytes = simulate_plan(Problem(task.graph), plan.decisions, task.device).peak_bytes + task.margin_bytes
        limit_bytes = min((n for n in (task.budget_bytes, task.usable_bytes) if n is not None), default=None)
        if limit_bytes is not None and peak_bytes > limit_bytes:
            _log.info(
                "the given plan would need %s with what is on the device here, where %s may be used: its step is "
                "planned anew", format_bytes(peak_bytes), format_bytes(limit_bytes),
            )  # fmt: skip
            return None
        return with_margin(plan, peak_bytes - plan.predicted_peak_bytes)

    @override
    def compile(self, graph: StepGraph, plan: MemoryPlan) -> Program:
        is_as_imported = plan.decisions == self.plan_here.decisions
        return compile_plan(graph, plan, is_imported=self.is_captured or is_as_imported)

    @override
    def found_bytes(self, graph: StepGraph) -> int | None:
        if self.step is None:
            return None
        return sum(graph.taken_bytes(storage.num_bytes) for storage in graph.storages if storage.is_persistent)
