"""The life of a plan: a step's shape is recorded, planned, verified, measured, planned once more, and then run.

::

    recording --> verifying --> measuring --> planned
        ^             |             |            |
        +-------------+-------------+------------+--> unplanned

Step 1 of a new shape is recorded. Step 2 runs under the first plan, and its replays are verified; step 3 is measured;
the final plan is in force from step 4 on. A plan that needs no recording (of other sizes, of another structure, of the
user) is final at once. A replay that gave other bits goes back to verifying, and so does what changes for good to
recording. *Unplanned* steps have no plan; some of them are recorded to get one.

The only place where a specialization comes to another phase. Before a step :func:`begin_step` and :func:`ensure_plan`
say what it does. What it showed comes in as a :class:`StepShown`, and
:func:`learn` says what the next ones do. Nothing here plans but :func:`ensure_plan`: a plan is given up by
:meth:`PlanEntry.replan`, with a reason, and there is none until the next step begins.

The budget is a promise. What is on the device beside the step is counted before each plan is made, and again when it
grows. By how much a measured peak exceeded the predicted one is a margin of the plans made afterwards, or memory of the
op at which it was seen twice; where a budget has no room for it, that is an error while the plan is being found, and
one warning once it was in force. Steps that take longer than the plan said, devices that run out of memory, and plans
made in haste whose steps have lost more than a search takes have the next step planned anew.

What becomes of a shape whose steps leave their plan is up to
:mod:`~lightning_offload.plugins.structure_changes`, where its plan comes from to
:mod:`~lightning_offload.plugins.plan_source`.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection, Mapping, Sequence

import torch

from lightning_offload.accelerators import kind_of
from lightning_offload.capture.departures import Departures
from lightning_offload.capture.timing import OpTimes, retime, scaled
from lightning_offload.errors import BudgetInfeasibleError
from lightning_offload.graph.device_spec import DeviceSpec
from lightning_offload.graph.memory_plan import MemoryPlan, Tier
from lightning_offload.graph.step_graph import StepGraph
from lightning_offload.planning.planner import mode_share
from lightning_offload.plugins.data_parallel import shared_spec
from lightning_offload.plugins.hardware import Hardware
from lightning_offload.plugins.persistent import PersistentState
from lightning_offload.plugins.plan_entry import Phase, PlanEntry
from lightning_offload.plugins.plan_source import Imported, PlanTask, Recorded, Superset
from lightning_offload.plugins.planned_baseline import ExternalStorages, OldGradients, StorageRef
from lightning_offload.plugins.replanning import Links, with_unforeseen
from lightning_offload.plugins.settings import Settings
from lightning_offload.plugins.step_time_estimate import Halves, LaunchTimes, StepTimeEstimate, StepTimes
from lightning_offload.plugins.step_variants import Variant
from lightning_offload.plugins.structure_changes import Next
from lightning_offload.runtime.lanes import LaneTimes
from lightning_offload.runtime.ledger import Ledger
from lightning_offload.runtime.program import Program
from lightning_offload.runtime.sight import core_on
from lightning_offload.tensors import compiled_code, custom_ops
from lightning_offload.tensors.custom_ops import Standing
from lightning_offload.tensors.saved_forms import SavedForm
from lightning_offload.units import format_budget_exactly, format_bytes

_log = logging.getLogger(__name__)
_MAX_SURPRISES = 3  # recordings since backward wrote what the plan counted on; then the plan stays
_MAX_REPLANS = 4  # each tier can be refused once
_OF_ANOTHER_PLAN = 4  # what a plan did not foresee may be by a quarter more under another one
_TIGHTER = 0.9  # of the peak that a device had no room for
_WORTH = 0.1  # of what plans cost: about what a thorough search takes off


# ---- what steps show


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """A recorded step.

    Attributes:
        graph: The step.
        forms: By pack: what was saved.
        open_sizes: Sizes that depended on data.
        has_backward: Whether anything was read back.
        is_typical: Whether later steps will be like it: not the one in which an optimizer makes its state.
        gradient_bytes: Gradients of earlier steps that are among its storages.
        made_gradients: Those that it made.
        left: What it left on the device, gradients aside, each with the tick at which it was made.
        custom_ops: What calls of custom ops have shown, by identity.
        draws_numbers: Whether it drew random numbers.
    """

    graph: StepGraph
    forms: tuple[SavedForm, ...]
    open_sizes: frozenset[int]
    has_backward: bool
    is_typical: bool
    gradient_bytes: int
    made_gradients: Sequence[StorageRef]
    left: Sequence[tuple[torch.UntypedStorage, int]]
    custom_ops: Mapping[str, Standing]
    draws_numbers: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Peaks:
    """Peak of live bytes of a step, in all and by phase; None by phase where an allocator counted."""

    step: int
    forward: int | None = None
    backward: int | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepShown:
    """What a step showed, once it has ended.

    Attributes:
        program: The plan that it ran under; None for none.
        has_backward: Whether anything was read back.
        num_nodes: Autograd nodes that it made, where it kept everything; None where it did not.
        took_data: Whether it took ``Tensor.data`` of activations.
        moved: What it saved that left the device, and that stayed, where its plan did not say.
        plain: What it would have needed, had it kept everything, and what was there as it began; None if not known.
        peaks: Its peaks; None where they were not measured.
        recording: It, if it was recorded.
        old_gradients: Gradients of earlier steps, those before its backward aside.
        external: The persistent storages that it touched; None where nobody looked.
        has_deviated: Whether it left its plan.
        is_other: Whether it had other forwards than those that its plan is for.
        ledger: What decided about its saves, where it followed the plan for another structure.
        has_surprised: Whether backward wrote what the plan counts on, which took memory.
        verified: Storages whose replays were found to be right.
        is_watched: Whether its memory, its ops or its copies were measured.
        op_times: What its ops took, where that was measured.
        bytes_by_op: The peak between the op before and each; empty where that was not counted.
        times: What it took as a whole, where that was measured.
        drops: What it dropped of what was there; None where nobody watched.
        lane_times: What the lanes did, where that was measured.
        launched: What took an accelerator and its host how long, where that was measured.
        has_retried: Whether the allocator had to give its reserve back, in it or after it.
    """

    program: Program | None
    has_backward: bool
    num_nodes: int | None = None
    took_data: bool = False
    moved: tuple[int, int] | None = None
    plain: tuple[int, int] | None = None
    peaks: Peaks | None = None
    recording: Recording | None = None
    old_gradients: OldGradients = dataclasses.field(default_factory=OldGradients)
    external: ExternalStorages | None = None
    has_deviated: bool = False
    is_other: bool = False
    ledger: Ledger | None = None
    has_surprised: bool = False
    verified: Collection[int] = ()
    is_watched: bool = False
    op_times: OpTimes | None = None
    bytes_by_op: Sequence[int] = ()
    times: StepTimes | None = None
    drops: Departures | None = None
    lane_times: Mapping[Tier, LaneTimes] | None = None
    launched: LaunchTimes | None = None
    has_retried: bool = False


def learn(entry: PlanEntry, shown: StepShown, hardware: Hardware) -> None:
    """Take over what a step showed: of the specialization, and of the links where that was measured.

    Args:
        entry: The specialization.
        shown: That.
        hardware: Where it ran.
    """
    seen, budget_bytes, has_followed = entry.seen, hardware.budget_bytes, False
    entry.hooks.note(shown.num_nodes)
    entry.takes_data |= shown.took_data
    if shown.times is not None:
        seen.step_seconds, seen.stall_seconds = shown.times.step, shown.times.stall
    if shown.moved is not None:
        seen.swapped_bytes, seen.stayed_bytes = shown.moved
    if shown.plain is not None:
        entry.plain.learn(*shown.plain)
    if shown.peaks is not None:
        seen.measured_peak_bytes = shown.peaks.step
        seen.forward_peak_bytes = shown.peaks.forward or seen.forward_peak_bytes
        seen.backward_peak_bytes = shown.peaks.backward or seen.backward_peak_bytes
    if shown.recording is not None:
        _take_recording(entry, shown, shown.recording)
    elif shown.has_backward:
        has_followed = _has_followed(entry, shown, budget_bytes)
    if shown.drops is not None and (shown.recording is not None or has_followed):
        entry.note_drops(shown.drops, budget_bytes)
    if shown.has_retried:
        note_retries(entry)
    if shown.lane_times is None or entry.phase != "planned":
        return
    hardware.observe(shown.lane_times)
    # A device whose ops are timed is held back meanwhile: its step takes what no other does.
    is_as_usual = shown.op_times is None or not kind_of(hardware.device).has_streams
    if has_followed and shown.times is not None and is_as_usual:
        links = hardware.links_since(entry.made.spec)
        compare(entry, shown.times.step, shown.times.stall, shown.launched, links)


def _has_followed(entry: PlanEntry, shown: StepShown, budget_bytes: int | None) -> bool:
    """Take over what a step under a plan showed; whether it ran to its end under the plan that is in force."""
    entry.note_gradients(shown.old_gradients)
    if shown.has_deviated:
        if entry.family is None and not (entry.source.is_captured or shown.is_other):
            entry.begin_anew()
            _go_on(entry, entry.changes.deviated())
        return False
    if entry.phase == "planned" and entry.source.follows_ops:
        entry.changes.followed()  # which makes up for earlier ones that did not
    if shown.ledger is not None and entry.superset is not None:
        _go_on(entry, entry.changes.aligned(shown.ledger, entry.saved_bytes))
        if not entry.changes.aligns:
            entry.shortfall_bytes = 0  # of another structure
    if shown.has_surprised:
        _surprised(entry)
    entry.verified.update(shown.verified)
    if shown.external is not None and entry.external.known is None and entry.source.is_own:
        entry.external = shown.external  # of a step that was planned without a recording here
    if entry.program is not shown.program:
        return False
    if shown.op_times is not None:
        _take_measured(entry, shown.op_times, shown.bytes_by_op)
    elif shown.is_watched:
        check_peak(entry, budget_bytes, shown.bytes_by_op)
    elif shown.times is not None and entry.phase == "planned" and entry.source.is_own:
        entry.seen.step_time_estimate.note(shown.times)
    return True


# ---- phases

_FOLLOWING: Mapping[Phase, Collection[Phase]] = {
    "recording": ("recording", "verifying", "planned", "unplanned"),
    "verifying": ("recording", "verifying", "measuring", "planned", "unplanned"),
    "measuring": ("recording", "verifying", "planned", "unplanned"),
    "planned": ("recording", "verifying", "planned", "unplanned"),
    "unplanned": ("recording", "planned", "unplanned"),
}


def _enter(entry: PlanEntry, phase: Phase) -> None:
    """Have steps do something else from now on.

    Raises:
        AssertionError: That cannot follow on what they did so far.
    """
    if phase not in _FOLLOWING[entry.phase]:
        raise AssertionError(f"a kind of step that is {entry.phase} cannot come to be {phase}")
    entry.phase = phase


def begin_step(entry: PlanEntry) -> None:
    """A step is about to begin: it may be its turn to be recorded."""
    if not entry.spans_sizes:  # else it is counted for all sizes
        entry.plain.begin_step()
    if entry.phase not in ("planned", "unplanned"):
        return
    size = entry.changes.variants.size_of(entry.input_shapes) if entry.spans_sizes else 1.0
    following = entry.changes.begins(is_planned=entry.phase == "planned", size=size)
    if following == "record" and entry.phase == "unplanned":
        entry.shortfall_bytes = 0  # there may be more room
    _go_on(entry, following)


def _go_on(entry: PlanEntry, following: Next | None) -> None:
    if following == "record":
        record_again(entry)
    elif following == "align":
        align(entry)
    elif following == "unplan":
        entry.replan("structure")
        _enter(entry, "unplanned")


def record_again(entry: PlanEntry) -> None:
    """Record the next step in place of what is planned for."""
    if entry.superset is not None and not entry.changes.aligns:
        entry.source = Recorded()
    entry.replan("recorded")
    _enter(entry, "recording")


def align(entry: PlanEntry) -> None:
    """Have steps follow the widest of the recorded structures, each as far as it can."""
    superset = entry.superset
    size, guesses = (superset.size, superset.guesses_margin) if superset is not None else (1.0, True)
    entry.follow(Superset(entry.changes, size, guesses_margin=guesses))
    _enter(entry, "planned")


def take_imported(entry: PlanEntry, plan: MemoryPlan, step: StepGraph | None) -> None:
    """Follow a plan that the user gave.

    What is on the device beside the step is counted here, as are gradients of earlier steps where they are more.

    Args:
        entry: The specialization.
        plan: The plan.
        step: The step that it was captured with, which is followed from the first one on; None for the recorded one.
    """
    entry.source = Imported(plan, step)
    entry.replan("imported")
    if step is not None:
        entry.graph, entry.external = step, ExternalStorages()
        entry.baseline.gradients = OldGradients.of(step)
        _enter(entry, "planned")


def leave_imported(entry: PlanEntry) -> None:
    """Record the next step in place of a plan that was not made for it."""
    entry.has_left_imported = True
    source = entry.source
    if not isinstance(source, Imported):
        return
    entry.source = Recorded()
    if source.is_captured:
        entry.external = ExternalStorages()
        entry.graph, entry.shortfall_bytes, entry.baseline.headroom_bytes = None, 0, 0
        entry.baseline.gradients = OldGradients()
        entry.mismatched.clear()
        record_again(entry)


def gives_up(entry: PlanEntry, error: BudgetInfeasibleError) -> bool:
    """Whether a step that cannot be planned is planned otherwise, or not at all: no error ends what ran so far.

    Where structures change, a margin goes that was only guessed, then the next widest one is planned for.

    Args:
        entry: The specialization.
        error: Why it cannot be planned.
    """
    superset, changes = entry.superset, entry.changes
    if superset is not None and superset.guesses_margin:
        superset.guesses_margin = False
        if 0 < entry.shortfall_bytes <= superset.guess_bytes:
            entry.shortfall_bytes = 0  # what steps were seen to need comes before what they might
            align(entry)
            return True
    following: Next | None = "unplan" if entry.spans_sizes else changes.gives_up()  # others may be planned
    if superset is not None:
        entry.shortfall_bytes = 0  # of another structure
    _go_on(entry, following)
    if following == "unplan" and not entry.spans_sizes:
        entry.graph, entry.source = None, Recorded()  # of a step that is not like the others
        entry.external = ExternalStorages()
    if superset is not None and following is not None and not changes.has_told:
        changes.has_told = True
        _log.warning(
            "the model's structure changes from step to step under the same input shapes, and some such steps need "
            "more than the budget under any plan for that: %s; what they save is swapped out unless there is ample "
            "room for it, and no prediction keeps their peak within the budget",
            error,
        )
    return following is not None


def demote(entry: PlanEntry, storage: int) -> None:
    """Plan again without recomputing a storage whose replay did not give the same bits."""
    if storage in entry.mismatched:
        return
    entry.mismatched.add(storage)
    entry.replan("mismatch")
    if entry.family is not None:
        entry.family.version += 1
    elif entry.phase in ("verifying", "measuring", "planned") and not entry.source.is_captured:
        _enter(entry, "verifying")


def _surprised(entry: PlanEntry) -> None:
    """Backward wrote what the plan counts on, which took memory: record a step that does, a few times at most."""
    if entry.family is not None:
        return
    entry.num_surprises += 1
    if entry.num_surprises <= _MAX_SURPRISES and entry.phase in ("verifying", "measuring", "planned"):
        record_again(entry)


def _take_recording(entry: PlanEntry, shown: StepShown, recording: Recording) -> None:
    entry.made.state_version = -1
    graph = recording.graph
    if shown.external is not None:
        known = entry.external.known if shown.external.known is None else shown.external.known
        entry.external = dataclasses.replace(shown.external, known=known)
    if recording.draws_numbers:
        compiled_code.check_recomputation()
    if custom_ops.learn(recording.custom_ops):
        return  # it holds ops for what they are not held for any more: another step is recorded
    if not (recording.has_backward and recording.is_typical):
        if entry.changes.failed() == "unplan":
            _enter(entry, "unplanned")
        return
    if entry.graph is None or entry.graph.digest() != graph.digest():
        entry.mismatched.clear()
        entry.verified.clear()
    entry.replan("recorded")
    entry.graph, entry.num_demoted = graph, len(custom_ops.demoted())
    entry.baseline.recorded(graph, recording.gradient_bytes, recording.made_gradients, recording.left)
    entry.changes.num_failed = 0
    entry.hooks.restart()
    _enter(entry, "verifying")
    entry.was_restored = False
    entry.changes.variants.learn(
        Variant(
            graph, recording.forms, recording.open_sizes, entry.external, recording.gradient_bytes, entry.input_shapes
        )
    )
    if entry.changes.aligns:
        align(entry)
    else:
        entry.source = Recorded()
    entry.note_gradients(shown.old_gradients)


# ---- plans


def ensure_plan(entry: PlanEntry, hardware: Hardware, state: PersistentState, settings: Settings) -> None:
    """Have a plan for a recorded specialization, for the state and the hardware that there are now, and room for it.

    Args:
        entry: The specialization.
        hardware: Where it runs.
        state: What is on the device beside it.
        settings: How to plan.

    Raises:
        BudgetInfeasibleError: No plan can meet the budget.
        PlanError: A plan that was given cannot be carried out.
        SpillError: The disk has no room, and only disk may be used.
    """
    if entry.graph is None:
        return
    external, made = entry.external.references, entry.made
    if (external or entry.family is not None) and made.state_version != state.version:
        made.state_version = state.version
        if not entry.was_restored and state.buckets.are_gone_from(external):
            record_again(entry)  # it touched what is not there any more
    if entry.has_ops_among(custom_ops.demoted()):
        record_again(entry)  # they are not as they seemed
    if entry.is_seen_by_core not in (None, is_seen_by_core(entry, hardware.device)):
        record_again(entry)  # it has other ops now
    if entry.phase == "recording":
        return
    hardware.refresh()
    for _ in range(_MAX_REPLANS):
        if made.hardware_version not in (-1, hardware.version):
            entry.replan("hardware")
        if entry.program is None or made.hardware_version != hardware.version:
            made.hardware_version = hardware.version
            if isinstance(entry.source, Imported):
                entry.source.plan_here = hardware.adapted(entry.source.plan)
            spec = shared_spec(hardware.planning_spec(entry.saved_bytes), entry.graph, hardware.device)
            make_plan(entry, spec, hardware.budget_bytes, settings.policy, settings.keep)
        assert entry.program is not None
        if entry.phase == "unplanned" or hardware.prepare(entry.source, entry.program.layout):
            break  # steps without a plan go on with the slabs that they have made


def is_seen_by_core(entry: PlanEntry, device: torch.device) -> bool:
    """Whether the native core sees the ops of a specialization now."""
    return not isinstance(entry.source, Imported) and core_on(device) is not None


def make_plan(
    entry: PlanEntry, device: DeviceSpec, budget_bytes: int | None, policy: str, keep: tuple[str, ...]
) -> None:
    """Make the plan for a specialization; it comes into force.

    Args:
        entry: The specialization.
        device: What is planned for.
        budget_bytes: Peak of live device bytes allowed, None for no limit.
        policy: The policy.
        keep: Patterns of module names whose saved tensors stay on the device.

    Raises:
        BudgetInfeasibleError: The budget is below the floor.
        PlanError: The given plan is for another graph, or cannot be carried out.
    """
    assert entry.graph is not None
    made, baseline = entry.made, entry.baseline
    made.spec, made.seen_by_op, made.is_last_right, made.is_doubted = device, (), False, False
    entry.corrections.begin_plan()
    entry.seen.step_time_estimate = StepTimeEstimate()
    entry.begin_anew()
    task = PlanTask(
        graph=entry.graph, device=device, budget_bytes=budget_bytes, usable_bytes=entry.usable_bytes, policy=policy,
        keep=entry.graph.storages_saved_in(keep), mismatched=frozenset(entry.mismatched),
        mode_seconds=entry.corrections.mode_seconds, is_provisional=entry.phase != "planned",
        is_thorough=made.search == "due", margin_bytes=entry.margin_bytes,
    )  # fmt: skip
    try:
        plan = entry.source.make(task)
        if baseline.headroom_bytes:  # which is given up where there is no room for it: a smaller budget does
            plan = dataclasses.replace(plan, floor_bytes=plan.floor_bytes - baseline.headroom_bytes)
    except BudgetInfeasibleError as error:
        without_margin_bytes = error.floor_bytes - entry.margin_bytes
        needed_bytes = without_margin_bytes + entry.shortfall_bytes
        is_margin_too_much = budget_bytes is not None and without_margin_bytes <= budget_bytes
        is_accepted = (made.is_over and is_margin_too_much) or entry.is_slightly_over(needed_bytes, budget_bytes)
        if not (baseline.headroom_bytes or is_accepted):
            raise
        baseline.headroom_bytes = 0
        plan = entry.source.make(
            dataclasses.replace(task, margin_bytes=entry.shortfall_bytes, must_fit=not is_accepted)
        )
    if budget_bytes is not None and made.is_over and plan.predicted_peak_bytes > budget_bytes:
        entry.warn(budget_bytes, plan.predicted_peak_bytes)
    entry.changes.is_retried = False
    made.search = "done" if made.search is not None else None
    entry.program = entry.source.compile(entry.graph, plan)


def weigh_search(entry: PlanEntry) -> None:
    """Have a hasty plan made again, thoroughly, once its steps have lost so much that the search pays.

    Plans are made in haste where sizes or structures change, so that few steps may run under each. A search takes off a
    tenth of what a plan costs, or less: so it is due when that much of what the steps took beyond plain ones is what a
    search takes.
    """
    made, plan = entry.made, entry.plan
    if plan is None or made.search is not None or plan.policy != "auto" or entry.source.is_own:
        return
    made.lost_seconds += lost_seconds(plan)
    if pays(made.lost_seconds, entry.shared_changes.search_seconds):
        made.search = "due"
        entry.replan("searched")


def lost_seconds(plan: MemoryPlan | None) -> float:
    """What a step under a plan takes beyond a plain one."""
    return max(0.0, plan.predicted_step_seconds - plan.plain_step_seconds) if plan is not None else 0.0


def pays(lost_seconds: float, planning_seconds: float) -> bool:
    """Whether steps have lost so much that a better plan, which takes so long to make, pays."""
    return _WORTH * lost_seconds > planning_seconds


# ---- measured steps


def _take_measured(entry: PlanEntry, times: OpTimes, bytes_by_op: Sequence[int]) -> None:
    """Take over what a step showed whose ops were timed; its peaks were noted before."""
    assert entry.graph is not None
    assert entry.plan is not None
    entry.graph = retime(entry.graph, times)
    if entry.phase == "verifying":
        entry.made.seen_by_op = tuple(bytes_by_op)
        _enter(entry, "measuring")
    elif entry.phase == "measuring":
        unforeseen_bytes, known_bytes = entry.unforeseen_bytes, entry.shortfall_bytes
        if not _is_final(entry.plan, unforeseen_bytes):
            _take_over_unforeseen(entry, bytes_by_op)
            entry.replan("time")
            _enter(entry, "planned")
        else:  # what it keeps stays; its figures are those of the step as it was seen
            _enter(entry, "planned")
            entry.shortfall_bytes = unforeseen_bytes
            entry.count_more(unforeseen_bytes - known_bytes)


def _is_final(plan: MemoryPlan, unforeseen_bytes: int) -> bool:
    """Whether nothing measured can change the plan: one that keeps everything, and fits."""
    if plan.decisions:
        return False
    return plan.budget_bytes is None or plan.predicted_peak_bytes + unforeseen_bytes <= plan.budget_bytes


def check_peak(entry: PlanEntry, budget_bytes: int | None, bytes_by_op: Sequence[int] = ()) -> None:
    """Plan anew where a step under the final plan was measured above the budget; tell of one without a plan.

    Args:
        entry: The specialization.
        budget_bytes: The budget.
        bytes_by_op: The peak between the op before and each; empty where that was not counted.
    """
    measured, plan, superset, made = entry.seen.measured_peak_bytes, entry.plan, entry.superset, entry.made
    if entry.family is not None and plan is not None:  # others of it may be closer to the budget
        entry.family.shortfall_bytes = max(entry.family.shortfall_bytes, entry.unforeseen_bytes)
    if superset is not None and plan is not None and entry.graph is not None and measured is not None:
        needed_bytes = superset.wider_margin(entry.unforeseen_bytes)
        _widen_margin(entry, superset, needed_bytes - entry.shortfall_bytes, budget_bytes)
        return
    if budget_bytes is None or measured is None or measured <= budget_bytes:
        return
    if plan is None:
        entry.warn(budget_bytes, measured)
    elif entry.unforeseen_bytes > entry.shortfall_bytes:
        more_bytes = entry.unforeseen_bytes - entry.shortfall_bytes
        has_no_better = plan.predicted_peak_bytes <= budget_bytes < plan.floor_bytes + more_bytes
        if has_no_better and not (made.is_doubted or made.is_over):
            _doubt(entry, budget_bytes, bytes_by_op)
            return
        _take_over_unforeseen(entry, bytes_by_op)
        made.is_over = True
        entry.replan("peak", lasts=True)


def _doubt(entry: PlanEntry, budget_bytes: int, bytes_by_op: Sequence[int]) -> None:
    """Measure the next step under the plan as well: what was there once may have been there by chance."""
    assert entry.plan is not None
    entry.made.is_doubted, entry.made.seen_by_op = True, tuple(bytes_by_op)
    entry.begin_anew()
    _log.warning(
        "a step was measured at %s, above the budget of %s, where its plan needs %s and none needs less: the next step "
        "is measured again",
        format_bytes(entry.seen.measured_peak_bytes or 0), format_budget_exactly(budget_bytes),
        format_bytes(entry.plan.predicted_peak_bytes),
    )  # fmt: skip


def _widen_margin(entry: PlanEntry, superset: Superset, more_bytes: int, budget_bytes: int | None) -> None:
    """A step of another structure needed more than foreseen, as others may: plan anew where that does not fit."""
    if more_bytes <= 0:
        return
    if not entry.widen_margin(more_bytes, budget_bytes):
        entry.shortfall_bytes += more_bytes // _OF_ANOTHER_PLAN
        entry.changes.counted_sizes.discard(superset.size)
    if entry.spans_sizes:
        entry.changes.note_margin(entry.shortfall_bytes, superset.size)


def _take_over_unforeseen(entry: PlanEntry, bytes_by_op: Sequence[int]) -> None:
    """Note by how much a measured peak exceeded what was predicted, and where memory is that the graph lacks."""
    assert entry.graph is not None
    assert entry.plan is not None
    made, measured = entry.made, entry.seen.measured_peak_bytes
    entry.shortfall_bytes = entry.unforeseen_bytes
    if entry.family is not None:
        entry.family.shortfall_bytes = max(entry.family.shortfall_bytes, entry.shortfall_bytes)
    if not entry.source.is_own:  # its ops are not those of the graph
        return
    before, made.seen_by_op = made.seen_by_op, tuple(bytes_by_op)
    is_seen_twice = len(before) == len(bytes_by_op) > 0  # once may be by chance: a copy that was late
    if entry.shortfall_bytes and is_seen_twice and made.spec is not None and measured is not None:
        entry.graph, entry.shortfall_bytes = with_unforeseen(
            entry.graph, entry.plan, made.spec, measured, tuple(map(min, before, bytes_by_op))
        )


def compare(
    entry: PlanEntry,
    step_seconds: float,
    stall_seconds: float,
    launched: LaunchTimes | None = None,
    links: Links = "as planned",
) -> None:
    """Plan again if planned steps show that links, compute or the host are not what the plan counted on.

    That is done a few times at most.

    Args:
        entry: The specialization.
        step_seconds: What the step took.
        stall_seconds: The part of it in which compute waited for copies.
        launched: What took an accelerator and its host how long; None where that is not known.
        links: How fast these turned out to be.
    """
    plan, spec = entry.plan, entry.made.spec
    if plan is None or entry.graph is None or spec is None or not entry.source.is_own:
        return
    waits = launched.waits(entry.graph, plan, stall_seconds) if launched is not None else Halves(0.0, 0.0)
    entry.seen.step_time_estimate.note_waits(sum(waits))
    factor = entry.corrections.by_time(plan, spec, step_seconds, stall_seconds, sum(waits), links)
    if factor is not None:
        entry.graph = scaled(entry.graph, factor) if factor != 1 else entry.graph
    elif not (
        _may_go_without_mode(entry) and entry.corrections.by_mode(plan, spec, mode_share(entry.graph, waits.forward))
    ):
        return
    entry.replan("host" if factor is None else "time", lasts=True)


def _may_go_without_mode(entry: PlanEntry) -> bool:
    """Whether another plan would spare its steps the dispatch mode."""
    is_ours = entry.plan is not None and entry.plan.policy == "auto" and not isinstance(entry.source, Imported)
    return is_ours and not (entry.takes_data or entry.has_deviated)


def ran_out_of_memory(entry: PlanEntry) -> None:
    """Plan tighter: the device has less than the plan counted on."""
    if entry.plan is None:
        return
    entry.usable_bytes = max(entry.plan.floor_bytes, int(_TIGHTER * entry.plan.predicted_peak_bytes))
    entry.replan("out of memory")
    entry.seen.measured_peak_bytes = None
    entry.begin_anew()
    if entry.superset is not None:
        entry.changes.counted_sizes.discard(entry.superset.size)


def note_retries(entry: PlanEntry) -> None:
    """Plan tighter where the allocator gives its reserve back again and again, for which the device stands still.

    Once is no sign of that: the first step under a new plan finds the reserve cut for the one before.
    """
    if entry.phase != "planned" or entry.plan is None:
        return
    usable_bytes = entry.corrections.by_retries(entry.plan, entry.made.num_steps)
    if usable_bytes is not None:
        entry.usable_bytes = usable_bytes
        entry.replan("allocator")
        _log.info(
            "the device's allocator had to give back its reserve under the plan: steps are planned for %s",
            format_bytes(usable_bytes),
        )
