"""The life of a plan: a step's shape is recorded, planned, verified, measured, planned once more, and then run.

The only place where a kind of step comes to another phase (:mod:`~lightning_offload.plugins.phases`). Before a step
:func:`begin_step` and :func:`ensure_plan` say what it does. What it showed comes in as a :class:`StepShown`, and
:func:`learn` says what the next ones do. Nothing here plans but :func:`ensure_plan`: a kind of step whose plan is given
up has none until its next step begins.

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

from lightning_offload.capture.departures import Departures
from lightning_offload.capture.live import LiveBytes
from lightning_offload.capture.timing import OpTimes, retime, scaled
from lightning_offload.errors import BudgetInfeasibleError
from lightning_offload.graph.device_spec import DeviceSpec
from lightning_offload.graph.memory_plan import MemoryPlan
from lightning_offload.graph.step_graph import StepGraph
from lightning_offload.planning.planner import mode_share
from lightning_offload.planning.step_model import with_lifetimes_of
from lightning_offload.plugins.beside import OldGradients
from lightning_offload.plugins.data_parallel import shared_spec
from lightning_offload.plugins.hardware import Hardware
from lightning_offload.plugins.pace import Halves, LaunchTimes, StepTimes
from lightning_offload.plugins.persistent import PersistentState
from lightning_offload.plugins.plan_entry import PlanEntry
from lightning_offload.plugins.plan_source import Imported, PlanTask, Recorded, ShapeBucket, Superset
from lightning_offload.plugins.replanning import with_unforeseen
from lightning_offload.plugins.settings import Settings
from lightning_offload.plugins.step_variants import Variant
from lightning_offload.plugins.structure_changes import Next
from lightning_offload.plugins.touched import StorageRef, Touched
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
        touched: The persistent storages that it touched.
        forms: By pack: what was saved.
        open_sizes: Sizes that depended on data.
        has_backward: Whether anything was read back.
        is_typical: Whether later steps will be like it: not the one in which an optimizer makes its state.
        old_gradients: Gradients of earlier steps.
        gradient_bytes: Those of them that are among its storages.
        made_gradients: Those that it made.
        bare_bytes: What it needed beyond what was there before, with all that it saved swapped out; None if some
            stayed, or where that is not known.
        larger: What tells how long storages live, where some stayed that were saved; None where the recording does.
        left: What it left on the device, gradients aside, each with the tick at which it was made.
        custom_ops: What calls of custom ops have shown, by identity.
        draws_numbers: Whether it drew random numbers.
    """

    graph: StepGraph
    touched: dict[int, StorageRef]
    forms: tuple[SavedForm, ...]
    open_sizes: frozenset[int]
    has_backward: bool
    is_typical: bool
    old_gradients: OldGradients
    gradient_bytes: int
    made_gradients: Sequence[StorageRef]
    bare_bytes: int | None
    larger: StepGraph | None
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
        gradients: Identities of the gradients that were there when it began.
        live: What counted its bytes; None for nothing.
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
    gradients: Collection[int] = ()
    live: LiveBytes | None = None
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


def learn(kind: PlanEntry, shown: StepShown, budget_bytes: int | None) -> None:
    """Take over what a step showed.

    Args:
        kind: The kind of step.
        shown: That.
        budget_bytes: The budget.
    """
    seen = kind.seen
    if shown.num_nodes is not None:
        kind.hooks.note(shown.num_nodes)
    kind.takes_data |= shown.took_data
    if shown.moved is not None:
        seen.swapped_bytes, seen.stayed_bytes = shown.moved
    if shown.plain is not None:
        kind.plain.learn(*shown.plain)
    if shown.peaks is not None:
        seen.measured_peak_bytes = shown.peaks.step
        seen.forward_peak_bytes = shown.peaks.forward or seen.forward_peak_bytes
        seen.backward_peak_bytes = shown.peaks.backward or seen.backward_peak_bytes
    if shown.recording is not None:
        _take_recording(kind, shown.recording, shown.live, shown.gradients)
    elif not (shown.has_backward and _has_followed(kind, shown, budget_bytes)):
        return
    if shown.drops is not None:
        kind.note_drops(shown.drops, budget_bytes)


def _has_followed(kind: PlanEntry, shown: StepShown, budget_bytes: int | None) -> bool:
    """Take over what a step under a plan showed; whether it ran to its end under the plan that is in force."""
    kind.note_gradients(shown.old_gradients)
    if shown.has_deviated:
        if kind.family is None and not (kind.source.is_captured or shown.is_other):
            kind.begin_anew()
            _go_on(kind, kind.changes.deviated())
        return False
    if kind.phase == "planned" and kind.source.follows_ops:
        kind.changes.followed()  # which makes up for earlier ones that did not
    superset = kind.superset
    if shown.ledger is not None and superset is not None:
        _go_on(kind, superset.followed(shown.ledger, kind.saved_bytes))
        if not kind.changes.aligns:
            kind.shortfall_bytes = 0  # of another structure
    if shown.has_surprised:
        _surprised(kind)
    kind.verified.update(shown.verified)
    if shown.live is not None:
        kind.learn_touched(shown.live, shown.gradients)
    if kind.program is not shown.program:
        return False
    if shown.op_times is not None:
        _take_measured(kind, shown.op_times, shown.bytes_by_op)
    elif shown.is_watched:
        check_peak(kind, budget_bytes, shown.bytes_by_op)
    elif shown.times is not None and kind.plan is not None and kind.phase == "planned" and kind.source.is_own:
        kind.seen.pace.note(kind.plan, shown.times)
    return True


# ---- phases


def begin_step(kind: PlanEntry) -> None:
    """A step is about to begin: it may be its turn to be recorded."""
    if not kind.spans_sizes:  # else it is counted for all sizes
        kind.plain.begin_step()
    if kind.phase not in ("planned", "unplanned"):
        return
    size = kind.changes.variants.size_of(kind.given) if kind.spans_sizes else 1.0
    following = kind.changes.begins(is_planned=kind.phase == "planned", size=size)
    if following == "record" and kind.phase == "unplanned":
        kind.shortfall_bytes = 0  # there may be more room
    _go_on(kind, following)


def _go_on(kind: PlanEntry, following: Next | None) -> None:
    if following == "record":
        record_again(kind)
    elif following == "align":
        align(kind)
    elif following == "unplan":
        kind.program = None
        kind.stage.enter("unplanned")


def record_again(kind: PlanEntry) -> None:
    """Record the next step in place of what is planned for."""
    if kind.superset is not None and not kind.changes.aligns:
        kind.source = Recorded(kind.source.touched)
    kind.drop_plan()
    kind.stage.enter("recording")


def align(kind: PlanEntry) -> None:
    """Have steps follow the widest of the recorded structures, each as far as it can."""
    superset = kind.superset
    size, guesses = (superset.size, superset.guesses_margin) if superset is not None else (1.0, True)
    kind.follow(Superset(kind.changes, size, guesses_margin=guesses, before=superset))
    kind.stage.enter("planned")


def follow_other_sizes(kind: PlanEntry) -> None:
    """Take over what steps of other sizes have shown since, where structures change along with these."""
    superset = kind.superset
    if superset is None:
        return
    if not superset.is_up_to_date and kind.phase == "planned":
        align(kind)
    more_bytes = kind.changes.margin_at(superset.size) - kind.shortfall_bytes
    if more_bytes > 0:
        kind.shortfall_bytes += more_bytes
        kind.program = None


def take_given(kind: PlanEntry, plan: MemoryPlan, step: StepGraph | None) -> None:
    """Follow a plan that the user gave.

    What is on the device beside the step is counted here, as are gradients of earlier steps where they are more.

    Args:
        kind: The kind of step.
        plan: The plan.
        step: The step that it was captured with, which is followed from the first one on; None for the recorded one.
    """
    before = kind.source
    kind.source = Imported(plan, step, before.touched if step is None else None)
    kind.source.was_restored = before.was_restored
    kind.drop_plan()
    if step is not None:
        kind.graph = step
        kind.beside.gradients = OldGradients.of(step)
        kind.stage.enter("planned")


def leave_given(kind: PlanEntry) -> None:
    """Record the next step in place of a plan that was not made for it."""
    kind.has_left_given = True
    source = kind.source
    if not isinstance(source, Imported):
        return
    kind.source = Recorded(None if source.is_captured else source.touched, was_restored=source.was_restored)
    if source.is_captured:
        kind.graph, kind.shortfall_bytes, kind.beside.headroom_bytes = None, 0, 0
        kind.beside.gradients = OldGradients()
        kind.mismatched.clear()
        record_again(kind)


def gives_up(kind: PlanEntry, error: BudgetInfeasibleError) -> bool:
    """Whether a step that cannot be planned is planned otherwise, or not at all: no error ends what ran so far.

    Where structures change, a margin goes that was only guessed, then the next widest one is planned for.

    Args:
        kind: The kind of step.
        error: Why it cannot be planned.
    """
    superset, changes = kind.superset, kind.changes
    if superset is not None and superset.guesses_margin:
        superset.guesses_margin = False
        if 0 < kind.shortfall_bytes <= superset.guess_bytes:
            kind.shortfall_bytes = 0  # what steps were seen to need comes before what they might
            align(kind)
            return True
    following: Next | None = "unplan" if kind.spans_sizes else changes.gives_up()  # others may be planned
    if superset is not None:
        kind.shortfall_bytes = 0  # of another structure
    _go_on(kind, following)
    if following == "unplan" and not kind.spans_sizes:
        kind.graph, kind.source = None, Recorded()  # of a step that is not like the others
    if superset is not None and following is not None and not changes.has_told:
        changes.has_told = True
        _log.warning(
            "the model's structure changes from step to step under the same input shapes, and some such steps need "
            "more than the budget under any plan for that: %s; what they save is swapped out unless there is ample "
            "room for it, and no prediction keeps their peak within the budget",
            error,
        )
    return following is not None


def demote(kind: PlanEntry, storage: int) -> None:
    """Plan again without recomputing a storage whose replay did not give the same bits."""
    if storage in kind.mismatched:
        return
    kind.mismatched.add(storage)
    kind.drop_plan()
    if kind.family is not None:
        kind.family.version += 1
    elif kind.phase in ("verifying", "measuring", "planned") and not kind.source.is_captured:
        kind.stage.enter("verifying")


def _surprised(kind: PlanEntry) -> None:
    """Backward wrote what the plan counts on, which took memory: record a step that does, a few times at most."""
    if kind.family is not None:
        return
    kind.num_surprises += 1
    if kind.num_surprises <= _MAX_SURPRISES and kind.phase in ("verifying", "measuring", "planned"):
        record_again(kind)


def _take_recording(kind: PlanEntry, recording: Recording, live: LiveBytes | None, gradients: Collection[int]) -> None:
    kind.made.state_version = -1
    kind.seen.bare_bytes = recording.bare_bytes
    known = Touched.seen(live, gradients).known if live is not None else kind.source.touched.known
    touched, graph = Touched(recording.touched, known), recording.graph
    kind.source.touched = touched
    if recording.draws_numbers:
        compiled_code.check_recomputation()
    if custom_ops.learn(recording.custom_ops):
        return  # it holds ops for what they are not held for any more: another step is recorded
    if recording.larger is not None:
        found = with_lifetimes_of(graph, recording.larger)
        if found is None:
            kind.differs = True  # it is recorded again, with all swapped out
            return
        graph = found
    if not (recording.has_backward and recording.is_typical):
        if kind.changes.failed() == "unplan":
            kind.stage.enter("unplanned")
        return
    if kind.graph is None or kind.graph.digest() != graph.digest():
        kind.mismatched.clear()
        kind.verified.clear()
    kind.graph, kind.program, kind.num_demoted = graph, None, len(custom_ops.demoted())
    old = recording.old_gradients
    kind.beside.recorded(graph, recording.gradient_bytes, recording.made_gradients, recording.left)
    kind.changes.num_failed = 0
    kind.hooks.restart()
    kind.stage.enter("verifying")
    kind.changes.variants.learn(
        Variant(graph, recording.forms, recording.open_sizes, touched, recording.gradient_bytes, kind.given)
    )
    if kind.changes.aligns:
        align(kind)
    else:
        kind.source = Recorded(touched)
    kind.note_gradients(old)


# ---- plans


def ensure_plan(key: str, kind: PlanEntry, hardware: Hardware, state: PersistentState, settings: Settings) -> None:
    """Have a plan for a recorded kind of step, for the state and the hardware that there are now, and room for it.

    Args:
        key: What the kind of step is known by.
        kind: The kind of step.
        hardware: Where it runs.
        state: What is on the device beside it.
        settings: How to plan.

    Raises:
        BudgetInfeasibleError: No plan can meet the budget.
        PlanError: A plan that was given cannot be carried out.
        SpillError: The disk has no room, and only disk may be used.
    """
    if kind.graph is None:
        return
    touched, made = kind.source.touched.references, kind.made
    if (touched or kind.family is not None) and made.state_version != state.version:
        made.state_version = state.version
        if not kind.source.was_restored and state.buckets.are_gone_from(touched):
            record_again(kind)  # it touched what is not there any more
    if kind.has_ops_among(custom_ops.demoted()):
        record_again(kind)  # they are not as they seemed
    if kind.is_seen_by_core not in (None, is_seen_by_core(kind, hardware.device)):
        record_again(kind)  # it has other ops now
    if kind.phase == "recording":
        return
    hardware.refresh()
    for _ in range(_MAX_REPLANS):
        if kind.program is None or made.hardware_version != hardware.version:
            made.hardware_version = hardware.version
            if isinstance(kind.source, Imported):
                kind.source.plan_here = hardware.adapted(kind.source.plan)
            spec = shared_spec(hardware.planning_spec(kind.saved_bytes), kind.graph, hardware.device)
            make_plan(kind, spec, hardware.budget_bytes, settings.policy, settings.keep)
        assert kind.program is not None
        if kind.phase == "unplanned" or hardware.prepare(key, kind.program.layout):
            break  # steps without a plan go on with the slabs that they have made


def is_seen_by_core(kind: PlanEntry, device: torch.device) -> bool:
    """Whether the native core sees the ops of a kind of step now."""
    return not isinstance(kind.source, Imported) and core_on(device) is not None


def make_plan(
    kind: PlanEntry, device: DeviceSpec, budget_bytes: int | None, policy: str, keep: tuple[str, ...]
) -> None:
    """Make the plan for a kind of step; it comes into force.

    Args:
        kind: The kind of step.
        device: What is planned for.
        budget_bytes: Peak of live device bytes allowed, None for no limit.
        policy: The policy.
        keep: Patterns of module names whose saved tensors stay on the device.

    Raises:
        BudgetInfeasibleError: The budget is below the floor.
        PlanError: The given plan is for another graph, or cannot be carried out.
    """
    assert kind.graph is not None
    made, beside = kind.made, kind.beside
    made.spec, made.seen_by_op, made.superseded, made.is_doubted = device, (), None, False
    kind.corrections.begin_plan()
    kind.begin_anew()
    if isinstance(kind.source, ShapeBucket):
        kind.shortfall_bytes = kind.source.family.shortfall_bytes
    task = PlanTask(
        graph=kind.graph, device=device, budget_bytes=budget_bytes, usable_bytes=kind.usable_bytes, policy=policy,
        keep=kind.graph.storages_saved_in(keep), mismatched=frozenset(kind.mismatched),
        mode_seconds=kind.corrections.mode_seconds, is_provisional=kind.phase != "planned",
        is_thorough=made.must_search, margin_bytes=kind.margin_bytes,
    )  # fmt: skip
    try:
        plan = kind.source.make(task)
        if beside.headroom_bytes:  # which is given up where there is no room for it: a smaller budget does
            plan = dataclasses.replace(plan, floor_bytes=plan.floor_bytes - beside.headroom_bytes)
    except BudgetInfeasibleError as error:
        without_margin_bytes = error.floor_bytes - kind.margin_bytes
        needed_bytes = without_margin_bytes + kind.shortfall_bytes
        is_margin_too_much = budget_bytes is not None and without_margin_bytes <= budget_bytes
        is_accepted = (made.is_over and is_margin_too_much) or kind.is_slightly_over(needed_bytes, budget_bytes)
        if not (beside.headroom_bytes or is_accepted):
            raise
        beside.headroom_bytes = 0
        plan = kind.source.make(dataclasses.replace(task, margin_bytes=kind.shortfall_bytes, must_fit=not is_accepted))
    if budget_bytes is not None and made.is_over and plan.predicted_peak_bytes > budget_bytes:
        kind.warn(budget_bytes, plan.predicted_peak_bytes)
    made.must_search = kind.changes.is_retried = False
    kind.program = kind.source.compile(kind.graph, plan)
    made.last = kind.plan


def weigh_search(kind: PlanEntry) -> None:
    """Have a hasty plan made again, thoroughly, once its steps have lost so much that the search pays.

    Plans are made in haste where sizes or structures change, so that few steps may run under each. A search takes off a
    tenth of what a plan costs, or less: so it is due when that much of what the steps took beyond plain ones is what a
    search takes.
    """
    made, plan = kind.made, kind.plan
    if plan is None or made.is_searched or plan.policy != "auto" or kind.source.is_own:
        return
    note_loss(kind, plan)
    if pays(kind.made.lost_seconds, kind.search_seconds):
        made.is_searched = made.must_search = True
        kind.program = None


def note_loss(kind: PlanEntry, plan: MemoryPlan | None) -> None:
    """Note what the coming step takes beyond a plain one, under a plan that was made in haste, or is for others."""
    kind.made.lost_seconds += lost_seconds(plan)


def lost_seconds(plan: MemoryPlan | None) -> float:
    """What a step under a plan takes beyond a plain one."""
    return max(0.0, plan.predicted_step_seconds - plan.plain_step_seconds) if plan is not None else 0.0


def pays(lost_seconds: float, planning_seconds: float) -> bool:
    """Whether steps have lost so much that a better plan, which takes so long to make, pays."""
    return _WORTH * lost_seconds > planning_seconds


# ---- measured steps


def _take_measured(kind: PlanEntry, times: OpTimes, bytes_by_op: Sequence[int]) -> None:
    """Take over what a step showed whose ops were timed; its peaks were noted before."""
    assert kind.graph is not None
    assert kind.plan is not None
    kind.graph = retime(kind.graph, times)
    if kind.phase == "verifying":
        kind.made.seen_by_op = tuple(bytes_by_op)
        kind.stage.enter("measuring")
    elif kind.phase == "measuring":
        kind.stage.enter("planned")
        unforeseen_bytes, known_bytes = kind.unforeseen_bytes, kind.shortfall_bytes
        if not _is_final(kind.plan, unforeseen_bytes):
            _take_over_unforeseen(kind, bytes_by_op)
            kind.program = None
        else:  # what it keeps stays; its figures are those of the step as it was seen
            kind.shortfall_bytes = unforeseen_bytes
            kind.count_more(unforeseen_bytes - known_bytes)


def _is_final(plan: MemoryPlan, unforeseen_bytes: int) -> bool:
    """Whether nothing measured can change the plan: one that keeps everything, and fits."""
    if plan.decisions:
        return False
    return plan.budget_bytes is None or plan.predicted_peak_bytes + unforeseen_bytes <= plan.budget_bytes


def check_peak(kind: PlanEntry, budget_bytes: int | None, bytes_by_op: Sequence[int] = ()) -> None:
    """Plan anew where a step under the final plan was measured above the budget; tell of one without a plan.

    Args:
        kind: The kind of step.
        budget_bytes: The budget.
        bytes_by_op: The peak between the op before and each; empty where that was not counted.
    """
    measured, plan, superset, made = kind.seen.measured_peak_bytes, kind.plan, kind.superset, kind.made
    if kind.family is not None and plan is not None:  # others of it may be closer to the budget
        kind.family.shortfall_bytes = max(kind.family.shortfall_bytes, kind.unforeseen_bytes)
    if superset is not None and plan is not None and kind.graph is not None and measured is not None:
        needed_bytes = superset.wider_margin(kind.measured(kind.graph, plan, measured))
        _widen_margin(kind, superset, needed_bytes - kind.shortfall_bytes, budget_bytes)
        return
    if budget_bytes is None or measured is None or measured <= budget_bytes:
        return
    if plan is None:
        kind.warn(budget_bytes, measured)
    elif kind.unforeseen_bytes > kind.shortfall_bytes:
        more_bytes = kind.unforeseen_bytes - kind.shortfall_bytes
        has_no_better = plan.predicted_peak_bytes <= budget_bytes < plan.floor_bytes + more_bytes
        if has_no_better and not (made.is_doubted or made.is_over):
            _doubt(kind, budget_bytes, bytes_by_op)
            return
        _take_over_unforeseen(kind, bytes_by_op)
        made.is_over = True
        made.superseded, kind.program = plan, None


def _doubt(kind: PlanEntry, budget_bytes: int, bytes_by_op: Sequence[int]) -> None:
    """Measure the next step under the plan as well: what was there once may have been there by chance."""
    assert kind.plan is not None
    kind.made.is_doubted, kind.made.seen_by_op = True, tuple(bytes_by_op)
    kind.begin_anew()
    _log.warning(
        "a step was measured at %s, above the budget of %s, where its plan needs %s and none needs less: the next step "
        "is measured again",
        format_bytes(kind.seen.measured_peak_bytes or 0), format_budget_exactly(budget_bytes),
        format_bytes(kind.plan.predicted_peak_bytes),
    )  # fmt: skip


def _widen_margin(kind: PlanEntry, superset: Superset, more_bytes: int, budget_bytes: int | None) -> None:
    """A step of another structure needed more than foreseen, as others may: plan anew where that does not fit."""
    assert kind.plan is not None
    if more_bytes <= 0:
        return
    if budget_bytes is None or kind.plan.predicted_peak_bytes + more_bytes <= budget_bytes:
        kind.shortfall_bytes += more_bytes
        kind.count_more(more_bytes)
    else:
        kind.shortfall_bytes += more_bytes + more_bytes // _OF_ANOTHER_PLAN
        kind.made.superseded, kind.program = kind.plan, None
        kind.changes.counted_sizes.discard(superset.size)
    if kind.spans_sizes:
        kind.changes.note_margin(kind.shortfall_bytes, superset.size)


def _take_over_unforeseen(kind: PlanEntry, bytes_by_op: Sequence[int]) -> None:
    """Note by how much a measured peak exceeded what was predicted, and where memory is that the graph lacks."""
    assert kind.graph is not None
    assert kind.plan is not None
    made, measured = kind.made, kind.seen.measured_peak_bytes
    kind.shortfall_bytes = kind.unforeseen_bytes
    if kind.family is not None:
        kind.family.shortfall_bytes = max(kind.family.shortfall_bytes, kind.shortfall_bytes)
    if not kind.source.is_own:  # its ops are not those of the graph
        return
    before, made.seen_by_op = made.seen_by_op, tuple(bytes_by_op)
    is_seen_twice = len(before) == len(bytes_by_op) > 0  # once may be by chance: a copy that was late
    if kind.shortfall_bytes and is_seen_twice and made.spec is not None and measured is not None:
        kind.graph, kind.shortfall_bytes = with_unforeseen(
            kind.graph, kind.plan, made.spec, measured, tuple(map(min, before, bytes_by_op))
        )


def compare(
    kind: PlanEntry,
    step_seconds: float,
    stall_seconds: float,
    launched: LaunchTimes | None = None,
    *,
    is_link_slower: bool,
    is_link_faster: bool = False,
) -> None:
    """Plan again if planned steps show that links, compute or the host are not what the plan counted on.

    That is done a few times at most.

    Args:
        kind: The kind of step.
        step_seconds: What the step took.
        stall_seconds: The part of it in which compute waited for copies.
        launched: What took an accelerator and its host how long; None where that is not known.
        is_link_slower: Whether a link turned out slower; that matters if it shows in stalls.
        is_link_faster: Whether one turned out faster; that matters if the plan costs time.
    """
    plan, spec = kind.plan, kind.made.spec
    if plan is None or kind.graph is None or spec is None or not kind.source.is_own:
        return
    waits = launched.waits(kind.graph, plan, stall_seconds) if launched is not None else Halves(0.0, 0.0)
    kind.seen.pace.note_waits(plan, sum(waits))
    factor = kind.corrections.by_time(
        plan, spec, step_seconds, stall_seconds, sum(waits), is_slower=is_link_slower, is_faster=is_link_faster
    )
    if factor is not None:
        kind.graph = scaled(kind.graph, factor) if factor != 1 else kind.graph
    elif not (
        _may_go_without_mode(kind) and kind.corrections.by_mode(plan, spec, mode_share(kind.graph, waits.forward))
    ):
        return
    kind.made.superseded, kind.program = plan, None


def _may_go_without_mode(kind: PlanEntry) -> bool:
    """Whether another plan would spare its steps the dispatch mode."""
    is_ours = kind.plan is not None and kind.plan.policy == "auto" and not isinstance(kind.source, Imported)
    return is_ours and not (kind.takes_data or kind.changes.num_deviations)


def ran_out_of_memory(kind: PlanEntry) -> None:
    """Plan tighter: the device has less than the plan counted on."""
    if kind.plan is None:
        return
    kind.usable_bytes = max(kind.plan.floor_bytes, int(_TIGHTER * kind.plan.predicted_peak_bytes))
    kind.program = kind.seen.measured_peak_bytes = None
    kind.begin_anew()
    if kind.superset is not None:
        kind.changes.counted_sizes.discard(kind.superset.size)


def note_retries(kind: PlanEntry, num_retries: int) -> None:
    """Plan tighter where the allocator gives its reserve back again and again, for which the device stands still.

    Once is no sign of that: the first step under a new plan finds the reserve cut for the one before.

    Args:
        kind: The kind of step.
        num_retries: How often it had to in the last step, and after it.
    """
    if not num_retries or kind.phase != "planned" or kind.plan is None:
        return
    usable_bytes = kind.corrections.by_retries(kind.plan, kind.made.num_steps)
    if usable_bytes is not None:
        kind.usable_bytes, kind.program = usable_bytes, None
        _log.info(
            "the device's allocator had to give back its reserve under the plan: steps are planned for %s",
            format_bytes(usable_bytes),
        )
