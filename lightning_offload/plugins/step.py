"""One step under way: its plan, its executor, who watches it, its clock, its peaks, and what is learned at its end.

Peaks between steps are an optimizer's step above all, and what a device's allocator holds in reserve. An accelerator's
counts; reading its statistics costs host time, so they are read around watched steps alone. On a CPU the
tensors that an optimizer's step makes are counted as those of a training step are, by a dispatch mode that the
optimizer's own hooks put on and take off.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)
from typing_extensions import override

from lightning_offload.accelerators import Allocated, DeviceMemory, kind_of, memory_of
from lightning_offload.capture.live import Census, LiveBytes
from lightning_offload.capture.recorder import Recorder
from lightning_offload.capture.timing import Mark, OpTimes, clock_for, record_event
from lightning_offload.capture.workspace import op_memory_for
from lightning_offload.graph.memory_plan import MemoryPlan, Tier
from lightning_offload.graph.step_graph import StepGraph
from lightning_offload.plugins import feedback
from lightning_offload.plugins.data_parallel import shared_spec
from lightning_offload.plugins.hardware import Hardware
from lightning_offload.plugins.pace import Halves, LaunchTimes, StepTimes
from lightning_offload.plugins.persistent import PersistentState
from lightning_offload.plugins.plan_entry import PlanEntry
from lightning_offload.plugins.plan_making import make_plan
from lightning_offload.plugins.settings import Settings
from lightning_offload.plugins.shape_families import Room
from lightning_offload.runtime.executor import StepExecutor
from lightning_offload.runtime.hooks import InfraMode
from lightning_offload.runtime.lanes import LaneTimes
from lightning_offload.runtime.native_executor import NativeExecutor, core_for
from lightning_offload.runtime.sight import core_on
from lightning_offload.runtime.tiers import Tiers
from lightning_offload.runtime.verifier import Verifier
from lightning_offload.tensors.observer import StepObserver, observe_all
from lightning_offload.tensors.op_facts import facts_of


@dataclasses.dataclass(slots=True)
class StepRun:
    """One step under way, and what is taken over from it at its end.

    Attributes:
        kind: The kind of step.
        device: Where it runs.
        executor: Executes it.
        recorder: Records it, if it is recorded.
        times: Measures its ops, if it runs under a plan that is not final.
        live: Counts live bytes: where the device does not, and what a recorded step has to do with of what was there.
        verifier: Compares replays, if they are not trusted yet.
        clock: Measures the time spent in its scopes.
        optimizer_ran_inside: Whether an optimizer updated parameters within its scopes.
        state_version: Version of the persistent state when it began.
        old_gradients: Gradients that were there when it began: bytes by identity of the storage.
        accumulated: Those that were there when its backward began.
        bytes_out_of_sight: What is on the device and in no census: buckets of DDP that were not met yet.
        device_peak_bytes: The allocator's peak over its scopes, on a device that has one.
        there: What such a device's allocator held when a step without a plan began; None where it was not asked.
        held_bytes: What was on the device when a recorded step began, gradients of earlier steps aside; None where that
            is not known.
        larger: The recorded step that tells how long storages live, where some of what is saved may stay.
        slack_bytes: What it came to hold in a recorded step beyond what was alive at once.
        is_watched: Whether its memory, its ops or its copies are measured.
        lane_times: What the lanes did, if that was measured.
        seconds: Time spent in its scopes, once it is finished and if that was measured.
    """

    kind: PlanEntry
    device: torch.device
    tiers: Tiers
    executor: StepExecutor
    recorder: Recorder | None
    times: OpTimes | None
    live: LiveBytes | None
    verifier: Verifier | None
    clock: StepClock
    peaks: DevicePeaks
    is_watched: bool
    optimizer_ran_inside: bool = False
    state_version: int = 0
    old_gradients: dict[int, int] = dataclasses.field(default_factory=dict)
    accumulated: dict[int, int] = dataclasses.field(default_factory=dict)
    bytes_out_of_sight: int = 0
    device_peak_bytes: int | None = None
    there: Allocated | None = None
    held_bytes: int | None = None
    larger: StepGraph | None = None
    slack_bytes: int | None = None
    lane_times: dict[Tier, LaneTimes] | None = None
    seconds: float | None = None

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """Around each of the step's scopes."""
        with self.clock.running():
            try:
                yield
            finally:
                if self.recorder is not None:
                    self.recorder.end_scope()
                if self.is_watched:
                    self._note_device_peak()

    def _note_device_peak(self) -> None:
        peak = self.peaks.end_scope(self.device)
        if peak is None:
            return
        for observer in (self.recorder, self.times):  # they reset the allocator's peak for each op
            peak = max(peak, (observer.allocator_peak_bytes or 0) if observer is not None else 0)
        self.device_peak_bytes = max(self.device_peak_bytes or 0, peak)
        memory = memory_of(self.device)
        if self.recorder is not None and self.there is not None and memory is not None:
            # What was held before may be a user's: it is there to be used.
            used_bytes = max(self.device_peak_bytes, self.there.reserved_bytes)
            self.slack_bytes = max(0, memory.reserved_bytes() - used_bytes)

    @property
    def stall_seconds(self) -> float:
        """Time that compute waited for copies, as far as it was measured."""
        times = (self.lane_times or {}).values()
        return self.executor.stall_seconds + sum(t.stall_seconds for t in times)

    def note_there(self) -> None:
        """Note what is on the device as it begins, where it shows what such steps need that keep everything."""
        memory = memory_of(self.device)
        if self.is_watched and self.executor.program is None and memory is not None:
            self.there = memory.now()

    def watch_gradients(self, now: dict[int, int], gradients: Callable[[], dict[int, int]]) -> None:
        """Note the gradients of earlier steps: those there now, and those there when backward begins."""
        self.old_gradients = now

        def note() -> None:
            self.clock.backward_begins()
            self.accumulated = gradients() if now else {}  # only a backward makes others

        if self.executor.packs:
            self.executor.on_backward = note

    def finish(self, state: PersistentState, budget_bytes: int | None) -> None:
        """Hand what was seen to the kind of step.

        Args:
            state: What is on the device beside the steps.
            budget_bytes: The budget.
        """
        kind = self.kind
        self._take_times()
        if self.executor.keeps_all:
            kind.hooks.note(self.executor.num_nodes)
        else:
            kind.takes_data |= self.executor.took_data
            if self.executor.program is None:
                kind.swapped_bytes, kind.stayed_bytes = self.executor.swapped_bytes, self.executor.stayed_bytes
                self._learn_plain_need(self.executor.swapped_bytes)
        if not self.executor.num_unpacks and self.recorder is None:
            return
        self._note_peaks()
        accumulated_bytes = sum(self.accumulated.values())
        if self.recorder is not None:
            state.buckets.place(self.recorder.all_reduced())
            kind.state_version = -1
            is_typical = not (self.optimizer_ran_inside and state.version != self.state_version)
            has_stayed = kind.stayed_bytes > 0
            kind.bare_bytes = self._bare_bytes() if not has_stayed else None
            kind.recorded(
                self.recorder, self.live, self.old_gradients, accumulated_bytes,
                is_typical=is_typical, larger=self.larger if has_stayed else None,
            )  # fmt: skip
            return
        kind.note_gradients(0, accumulated_bytes)
        if self.executor.has_deviated:
            if not kind.is_step_given:
                kind.deviated()
            return
        kind.followed()
        superset = self.executor.superset
        if superset is not None:
            kind.swapped_bytes, kind.stayed_bytes = self.executor.swapped_bytes, superset.kept_bytes
            kind.aligned(superset)
        if self.executor.unforeseen_bytes:
            kind.surprised()
        if self.verifier is not None:
            kind.verified |= self.verifier.verified
        if self.live is not None:
            kind.learn_known(self.live, self.old_gradients)
        if kind.program is not self.executor.program:
            return
        if self.times is not None:
            feedback.take_measured(kind, self.times, self._bytes_by_op())
        elif self.is_watched:
            feedback.check_peak(kind, budget_bytes, self._bytes_by_op())
        elif self.seconds is not None:
            kind.paced(StepTimes(self.seconds, self.stall_seconds, self.executor.replay_seconds))

    def _bare_bytes(self) -> int | None:
        """What a recorded step needed beyond what was there before, gradients of earlier steps aside."""
        peak_bytes = self.kind.measured_peak_bytes
        return peak_bytes - self.held_bytes if peak_bytes is not None and self.held_bytes is not None else None

    def _bytes_by_op(self) -> list[int]:
        """By op: the peak since the one before it; empty where nothing counted that, or where the plan explains it.

        What a write has made again early is there because this plan recomputes it: another plan has other values early.
        """
        by_op = self.live.by_op if self.live is not None and not self.executor.has_settled else None
        return [num_bytes + self.bytes_out_of_sight for num_bytes in by_op or ()]

    def _learn_plain_need(self, swapped_bytes: int) -> None:
        if self.device_peak_bytes is not None and self.there is not None:
            self.kind.plain.learn(self.device_peak_bytes + swapped_bytes - self.there.current_bytes)

    def _take_times(self) -> None:
        self.seconds = self.clock.seconds()
        if self.is_watched:
            self.lane_times = self.tiers.take_times()
            self.tiers.measure(False)

    def _note_peaks(self) -> None:
        kind = self.kind
        if self.device_peak_bytes is not None:
            kind.measured_peak_bytes = self.device_peak_bytes
        elif self.live is not None:
            kind.measured_peak_bytes = self.live.peak_bytes + self.bytes_out_of_sight
            kind.forward_peak_bytes = self.live.forward_peak_bytes + self.bytes_out_of_sight
            kind.backward_peak_bytes = self.live.backward_peak_bytes + self.bytes_out_of_sight


def _op_times(kind: PlanEntry, device: torch.device) -> OpTimes | None:
    """What measures the ops of a step under a plan that is not final.

    Workspaces and times are measured in different steps: reading the allocator around each op takes the host longer
    than many an op takes the device, and would be what is measured.
    """
    if kind.phase not in ("verifying", "measuring"):
        return None
    return OpTimes(clock_for(device), op_memory_for(device) if kind.phase == "verifying" else None)


def _room_under(plan: MemoryPlan, device: torch.device) -> Callable[[], int] | None:
    """Tells how much of what a plan needs at most is free; None where nothing counts it."""
    memory = memory_of(device)
    if memory is None:
        return None
    return lambda: plan.predicted_peak_bytes - memory.allocated_bytes()


def start_run(
    kind: PlanEntry,
    tiers: Tiers,
    device: torch.device,
    module: torch.nn.Module | None,
    verify: str,
    peaks: DevicePeaks,
    there: Census | None,
    persistent: Callable[[], Collection[int]],
    room: Room | None = None,
) -> StepRun:
    """Set up the executor and the observers that a step of this kind needs now.

    Args:
        kind: The kind of step.
        tiers: Where its tensors may go.
        device: Where it runs.
        module: The model, where it is known.
        verify: When replays are compared with their originals.
        peaks: Reads the device's allocator.
        there: The storages that are on the device; None where nobody looked.
        persistent: Gives the identities of storages that outlive the step.
        room: What need not leave, where the step is recorded.
    """
    program = kind.program
    is_recorded = kind.phase == "recording"
    recorder = Recorder(device, module, there=there.values() if there is not None else ()) if is_recorded else None
    times = _op_times(kind, device)
    counts = kind_of(device).counts_memory
    can_count = there is not None or counts
    is_watched = recorder is not None or times is not None or kind.is_due_for_measurement(can_count=can_count)
    live: LiveBytes | None = None
    if there is not None and recorder is not None:
        live = recorder
    elif there is not None and not counts and is_watched:
        live = LiveBytes(device, there.values(), by_op=True)
    must_verify = program is not None and program.is_recomputing and verify != "never"
    verifier: Verifier | None = None
    if program is not None and must_verify and (verify == "always" or kind.must_verify):
        trusted = kind.verified if verify == "first" else ()
        verifier = Verifier(tiers, kind.demote, trusted, _room_under(program.plan, device))
    counter = recorder if recorder is not None else live
    observers: list[StepObserver] = [o for o in (counter, times) if o is not None]
    # A kind of step that has left its plan before runs under what can give up what the plan keeps.
    has_deviated = kind.changes.num_deviations or (kind.family is not None and kind.family.is_wary)
    is_light = not observers and kind.phase == "planned" and not has_deviated
    # What was never seen may need more than was predicted: then what the plan keeps is given up, too.
    is_sure = kind.family is None or not kind.is_first_sight
    is_given = kind.given_plan is not None
    if is_recorded:
        kind.is_seen_by_core = _is_seen_by_core(kind, device)
    make = functools.partial(StepExecutor, device=device, tiers=tiers, persistent=persistent, by_mode=is_given)
    observer = observe_all(tuple(observers))
    if program is not None and program.form_route is not None:
        sees_ops = observer is not None or kind.takes_data
        executor = make(program=program, observer=observer, verifier=None, sees_ops=sees_ops)
    elif program is not None and program.is_keep_all and is_light and is_sure:
        executor = make(
            program=program, observer=None, verifier=None, sees_ops=False, keeps_all=True,
            packs=not kind.sheds_hooks(), may_leave=program.plan.budget_bytes is not None,
        )  # fmt: skip
        is_watched = False
    else:
        planned = program if kind.phase not in ("recording", "unplanned") else None
        sees_ops = program is None or program.needs_ops or kind.takes_data or not is_light
        is_watched_by_nobody = observer is None and verifier is None and not is_given
        core = core_for(planned, device) if planned is not None and is_watched_by_nobody else None
        if planned is not None and core is not None:
            executor = NativeExecutor(
                core, device=device, tiers=tiers, program=planned, sees_ops=sees_ops, persistent=persistent
            )
        else:
            spare_bytes = room.spare_bytes if room is not None else 0
            executor = make(
                program=planned, observer=observer, verifier=verifier, sees_ops=sees_ops, spare_bytes=spare_bytes
            )
    if is_watched:
        tiers.take_times()  # forget what went before
        tiers.measure(True)
    return StepRun(
        kind=kind, device=device, tiers=tiers, executor=executor, recorder=recorder, times=times, live=live,
        verifier=verifier, clock=StepClock(device, is_watched=is_watched), peaks=peaks, is_watched=is_watched,
        larger=room.larger if room is not None else None,
    )  # fmt: skip


class _Forward(NamedTuple):
    """What a measured forward took.

    Attributes:
        host_seconds: The host.
        num_scopes: How many scopes had been closed at its end.
        open_scope: The device's marks of its part of the scope that was open then; None where none was.
    """

    host_seconds: float
    num_scopes: int
    open_scope: tuple[Mark, Mark] | None


class StepClock:
    """Adds up the scopes of one step.

    Args:
        device: Where the step runs.
        is_watched: Whether the step is measured; events cost host time, so other steps on a device go without.
    """

    def __init__(self, device: torch.device, *, is_watched: bool) -> None:
        self._device = device
        self._by_events = kind_of(device).has_streams
        self._is_watched = is_watched
        self._host_seconds = 0.0
        self._scopes: list[tuple[Mark, Mark]] = []
        self._began: float | None = None
        self._mark: Mark | None = None
        self._forward: _Forward | None = None

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Around each scope of the step."""
        if self._by_events and not self._is_watched:
            yield
            return
        mark = self._mark = record_event(self._device) if self._by_events else None
        began = self._began = time.perf_counter()
        try:
            yield
        finally:
            self._host_seconds += time.perf_counter() - began
            self._began = None
            if mark is not None:
                self._scopes.append((mark, record_event(self._device)))

    def backward_begins(self) -> None:
        """Note when the host comes to backward."""
        if self._forward is not None or not self._by_events or not self._is_watched:
            return
        if self._began is None or self._mark is None:
            self._forward = _Forward(self._host_seconds, len(self._scopes), None)
        else:
            open_scope = self._mark, record_event(self._device)
            seconds = self._host_seconds + time.perf_counter() - self._began
            self._forward = _Forward(seconds, len(self._scopes), open_scope)

    def launch_times(self) -> LaunchTimes | None:
        """What an accelerator's step took so far; None where that was not measured. Waits for the device."""
        forward, device_seconds = self._forward, self.seconds()
        if forward is None or device_seconds is None:
            return None
        scopes = [*self._scopes[: forward.num_scopes], *([forward.open_scope] if forward.open_scope else [])]
        in_forward = sum(begin.elapsed_time(end) for begin, end in scopes) / 1000
        host = Halves(forward.host_seconds, self._host_seconds - forward.host_seconds)
        device = Halves(in_forward, device_seconds - in_forward)
        return LaunchTimes(host, device, is_one=forward.open_scope is not None)

    def seconds(self) -> float | None:
        """The duration so far; None where it was not measured. Waits for the device."""
        if not self._by_events:
            return self._host_seconds
        if not self._scopes:
            return None
        self._scopes[-1][1].synchronize()
        return sum(begin.elapsed_time(end) for begin, end in self._scopes) / 1000


class DevicePeaks:
    """Reads the allocator at the seams between steps, and counts in optimizers' steps where there is none.

    Attributes:
        optimizer_peak_bytes: The highest peak between a watched step and the one after it: the optimizer's.
        reserved_bytes: What the allocator held from the device then, in use or not.
    """

    def __init__(self) -> None:
        self.optimizer_peak_bytes: int | None = None
        self.reserved_bytes: int | None = None
        self._num_retries: int | None = None
        self._was_watched = False
        self._mode: _OptimizerMode | None = None
        self._thread = 0

    def begin_step(self, device: torch.device, *, is_watched: bool) -> None:
        """Note what came after the last watched step; start counting anew if the coming one is watched."""
        memory = memory_of(device)
        if memory is None:
            return
        self._note_device(memory)
        if is_watched:
            memory.reset_peak()
        self._was_watched = is_watched

    @contextlib.contextmanager
    def paused(self, device: torch.device) -> Iterator[None]:
        """What is on the device inside, to measure its links say, is no optimizer's."""
        memory = memory_of(device)
        if memory is None or not self._was_watched:
            yield
            return
        self._note_device(memory)
        try:
            yield
        finally:
            memory.reset_peak()

    def _note_device(self, memory: DeviceMemory) -> None:
        if self._was_watched:
            self.note_optimizer(memory.peak_bytes())
            self.reserved_bytes = memory.reserved_bytes()

    def take_retries(self, device: torch.device) -> int:
        """How often the allocator had to give its reserve back to go on, since this was last asked."""
        memory = memory_of(device)
        if memory is None:
            return 0
        now = memory.num_retries()
        before, self._num_retries = self._num_retries, now
        return max(0, now - before) if before is not None else 0

    def end_scope(self, device: torch.device) -> int | None:
        """Peak since a watched step began; the optimizer's is counted from here on."""
        memory = memory_of(device)
        if memory is None:
            return None
        peak = memory.peak_bytes()
        memory.reset_peak()
        return peak

    def begin_optimizer(self, device: torch.device, there: Iterable[torch.UntypedStorage], more_bytes: int) -> None:
        """Count what an optimizer's step makes, on a device whose allocator does not.

        A hook has no part that an exception would run, so the mode goes under those of others: what they take off, on
        leaving, is their own.

        Args:
            device: Where it runs.
            there: What is there already.
            more_bytes: What is there and in no census.
        """
        self.end_optimizer(is_whole=False)
        self._mode, self._thread = _OptimizerMode(LiveBytes(device, there), more_bytes), threading.get_ident()
        _lay_under_all(self._mode)

    def end_optimizer(self, *, is_whole: bool) -> None:
        """Stop counting, if it was begun.

        Args:
            is_whole: Whether the optimizer's step has ended: not where it failed, or where a backward is inside.
        """
        if self._mode is None or self._thread != threading.get_ident():
            return  # it is on another thread's stack
        mode, self._mode = self._mode, None
        _take_off(mode)
        if is_whole:
            self.note_optimizer(mode.live.peak_bytes + mode.more_bytes)

    def note_optimizer(self, peak_bytes: int) -> None:
        """Take over the peak of an optimizer's step: the highest, since with accumulation not every step has one."""
        self.optimizer_peak_bytes = max(self.optimizer_peak_bytes or 0, peak_bytes)


def _lay_under_all(mode: TorchDispatchMode) -> None:
    """Put a mode under all of this thread's stack."""
    above = [_pop_mode() for _ in _get_current_dispatch_mode_stack()]
    for other in (mode, *reversed(above)):
        _push_mode(other)


def _take_off(mode: TorchDispatchMode) -> None:
    """Take a mode off this thread's stack, wherever it lies there."""
    if mode not in _get_current_dispatch_mode_stack():
        return
    above = []
    while (top := _pop_mode()) is not mode:
        above.append(top)
    for other in reversed(above):
        _push_mode(other)


class _OptimizerMode(InfraMode):
    """Counts what the ops inside make."""

    def __init__(self, live: LiveBytes, more_bytes: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = live
        self.more_bytes = more_bytes

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self.live.on_op(facts_of(func), args, kwargs, out, 0.0)
        return out


_MAX_REPLANS = 4  # each tier can be refused once


def _is_seen_by_core(kind: PlanEntry, device: torch.device) -> bool:
    """Whether the native core sees the ops of a kind of step now."""
    return kind.given_plan is None and core_on(device) is not None


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
    if (kind.touched.references or kind.family is not None) and kind.state_version != state.version:
        kind.state_version = state.version
        if not kind.was_restored and state.buckets.are_gone_from(kind.touched.references):
            kind.record_again()
    if kind.is_seen_by_core not in (None, _is_seen_by_core(kind, hardware.device)):
        kind.record_again()  # it has other ops now
    if kind.phase == "recording":
        return
    hardware.refresh()
    for _ in range(_MAX_REPLANS):
        if kind.program is None or kind.hardware_version != hardware.version:
            kind.hardware_version = hardware.version
            spec = shared_spec(hardware.planning_spec(kind.saved_bytes), kind.graph, hardware.device)
            given = hardware.adapted(kind.given_plan) if kind.given_plan is not None else None
            make_plan(kind, spec, hardware.budget_bytes, settings.policy, settings.keep, given)
        assert kind.program is not None
        if kind.phase == "unplanned" or hardware.prepare(key, kind.program.layout):
            break  # steps without a plan go on with the slabs that they have made


def learn_from(run: StepRun, hardware: Hardware) -> None:
    """Correct what is known of links and compute by a planned step that was measured."""
    if run.lane_times is None or run.kind.phase != "planned":
        return
    hardware.observe(run.lane_times)
    # A device whose ops are timed is held back meanwhile: its step takes what no other does.
    if run.seconds is not None and (run.times is None or not kind_of(run.device).has_streams):
        spec = run.kind.spec
        feedback.compare(
            run.kind,
            run.seconds,
            run.stall_seconds,
            run.clock.launch_times(),
            is_link_slower=hardware.is_slower_than(spec),
            is_link_faster=hardware.is_faster_than(spec),
        )
