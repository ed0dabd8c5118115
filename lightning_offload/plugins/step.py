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
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
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
from lightning_offload.capture.departures import Departures
from lightning_offload.capture.live import LiveBytes
from lightning_offload.capture.recorder import Recorder
from lightning_offload.capture.timing import Mark, OpTimes, clock_for, record_event
from lightning_offload.capture.workspace import op_memory_for, workspaces_on
from lightning_offload.graph.memory_plan import MemoryPlan, Tier
from lightning_offload.graph.step_graph import Accumulation
from lightning_offload.plugins.baseline import Baseline, There
from lightning_offload.plugins.lifecycle import Peaks, Recording, StepShown, demote, is_seen_by_core
from lightning_offload.plugins.persistent import PersistentState
from lightning_offload.plugins.plan_entry import PlanEntry
from lightning_offload.plugins.plan_source import Imported
from lightning_offload.plugins.planned_baseline import ExternalStorages, OldGradients, StorageRef
from lightning_offload.plugins.step_time_estimate import Halves, LaunchTimes, StepTimes
from lightning_offload.runtime.executor import StepExecutor
from lightning_offload.runtime.hooks import InfraMode
from lightning_offload.runtime.lanes import LaneTimes
from lightning_offload.runtime.native_executor import NativeExecutor, core_for
from lightning_offload.runtime.tiers import Tiers
from lightning_offload.runtime.verifier import Verifier
from lightning_offload.tensors import compiled_code
from lightning_offload.tensors.observer import StepObserver, observe_all
from lightning_offload.tensors.op_facts import facts_of


@dataclasses.dataclass(slots=True)
class StepRun:
    """One step under way, and what is taken over from it at its end.

    Attributes:
        entry: The specialization.
        device: Where it runs.
        executor: Executes it.
        recorder: Records it, if it is recorded.
        times: Measures its ops, if it runs under a plan that is not final.
        live: Counts live bytes: where the device does not, and what a recorded step has to do with of what was there.
        drops: Sees what it drops of what was there, if it is watched.
        verifier: Compares replays, if they are not trusted yet.
        clock: Measures the time spent in its scopes.
        state: The state of the training.
        optimizer_ran_inside: Whether an optimizer updated parameters within its scopes.
        state_version: Version of the persistent state when it began.
        buckets_version: That of DDP's buckets.
        old_gradients: Gradients that were there when it began: bytes by identity of the storage.
        accumulated: Those that were there when its backward began: bytes, and how often they were written; None if
            that did not show.
        bytes_out_of_sight: What is on the device and in no live scan: buckets of DDP that were not met yet.
        device_peak_bytes: The allocator's peak over its scopes, on a device that has one.
        there: What such a device's allocator held when a step without a plan began; None where it was not asked.
        slack_bytes: What it came to hold in a recorded step beyond what was alive at once.
        is_watched: Whether its memory, its ops or its copies are measured.
        is_other: Whether it had other forwards than those that its plan is for.
        like: What steps share that hold what they leave in the place of what another left, whatever its size.
    """

    entry: PlanEntry
    device: torch.device
    tiers: Tiers
    executor: StepExecutor
    recorder: Recorder | None
    times: OpTimes | None
    live: LiveBytes | None
    drops: Departures | None
    verifier: Verifier | None
    clock: StepClock
    peaks: DevicePeaks
    state: PersistentState
    is_watched: bool
    optimizer_ran_inside: bool = False
    state_version: int = 0
    buckets_version: int = 0
    old_gradients: dict[int, int] = dataclasses.field(default_factory=dict)
    accumulated: dict[int, tuple[int, int]] | None = None
    bytes_out_of_sight: int = 0
    device_peak_bytes: int | None = None
    there: Allocated | None = None
    slack_bytes: int | None = None
    is_other: bool = False
    like: str = ""
    _versions: dict[int, tuple[int, int]] = dataclasses.field(default_factory=dict)
    _added_to: set[int] = dataclasses.field(default_factory=set)

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """Around each of the step's scopes."""
        with self.clock.running():
            if self.recorder is not None:
                self.recorder.begin_scope()
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

    def _times(self, lane_times: Mapping[Tier, LaneTimes] | None) -> StepTimes | None:
        seconds = self.clock.seconds()
        if seconds is None:
            return None
        of_lanes = sum(times.stall_seconds for times in lane_times.values()) if lane_times else 0.0
        stall_seconds = self.executor.stall_seconds + of_lanes
        return StepTimes(seconds, stall_seconds, self.executor.replay_seconds)

    def begin(self) -> None:
        """It begins: note what is on the device, where it shows what such steps need that keep everything."""
        self.peaks.begin_step(self.device, is_watched=self.is_watched)
        memory = memory_of(self.device)
        if self.is_watched and self.executor.program is None and memory is not None:
            self.there = memory.now()
        if self.executor.packs:
            self.executor.on_backward = self._first_backward_begins

    def _first_backward_begins(self) -> None:
        """The first of its backwards does, of which the executor tells: note the gradients that are there."""
        self.clock.backward_begins()
        if self.recorder is not None:
            self.state.learn_leaves(self.recorder.leaves)
            self.recorder.watch_gradients(self.state.trainable())
        has_any = self.old_gradients or self.recorder is not None  # only a backward makes others
        self.accumulated = self._versions = self.state.gradient_versions() if has_any else {}

    def backward_begins(self) -> None:
        """One of its backwards begins."""
        if self._versions:
            self._versions = self.state.gradient_versions()

    def backward_ends(self) -> None:
        """One of its backwards has ended: what it wrote of the gradients of earlier steps it has added to."""
        if self._versions:
            for key, (_, version) in self.state.gradient_versions().items():
                if key in self._versions and version > self._versions[key][1]:
                    self._added_to.add(key)

    def finish(self, baseline: Baseline) -> StepShown:
        """What it showed, once it has ended.

        Args:
            baseline: What is on the device beside the steps.
        """
        executor, lane_times = self.executor, self.tiers.take_times() if self.is_watched else None
        if self.is_watched:
            self.tiers.measure(False)
        superset = executor.superset
        is_without_plan = executor.program is None and not executor.keeps_all
        has_backward = executor.num_unpacks > 0
        has_followed = has_backward and superset is not None and not executor.has_deviated
        moved: tuple[int, int] | None = None
        if is_without_plan:
            moved = executor.swapped_bytes, executor.stayed_bytes
        elif superset is not None and has_followed:
            moved = executor.swapped_bytes, superset.ledger.kept_bytes
        is_plain_known = is_without_plan or (has_followed and self.device_peak_bytes is None)
        shown = StepShown(
            program=executor.program,
            has_backward=has_backward,
            num_nodes=executor.num_nodes if executor.keeps_all else None,
            took_data=not executor.keeps_all and executor.took_data,
            moved=moved,
            plain=self._plain_need(executor.swapped_bytes) if is_plain_known else None,
            lane_times=lane_times,
            times=self._times(lane_times),
            has_retried=self.peaks.take_retries(self.device) > 0,
        )
        if not has_backward and self.recorder is None:
            return shown
        old_gradients = self._old_gradients()  # before a recording finds buckets among them
        left = self._left_behind(baseline)
        external = ExternalStorages.seen(self.live, self.old_gradients) if self.live is not None else None
        if self.recorder is not None:  # which knows of what nobody listed, too
            external = ExternalStorages(self.recorder.persistent_ids(), external.known if external else None)
        is_measured = self._is_like_others
        return dataclasses.replace(
            shown,
            peaks=self._peaks() if is_measured else None,
            recording=self._recording(left) if self.recorder is not None else None,
            old_gradients=old_gradients,
            external=external,
            has_deviated=executor.has_deviated,
            is_other=self.is_other,
            ledger=superset.ledger if superset is not None else None,
            has_surprised=executor.unforeseen_bytes > 0,
            verified=self.verifier.verified if self.verifier is not None else (),
            is_watched=self.is_watched and is_measured,
            op_times=self.times if is_measured else None,
            bytes_by_op=self._bytes_by_op() if is_measured else (),
            launched=self.clock.launch_times() if self.is_watched else None,
            drops=self.drops if is_measured else None,
        )

    @property
    def _is_like_others(self) -> bool:
        """Whether it needed, left and dropped what others do: one in which DDP made other buckets did not."""
        return self.state.buckets.version == self.buckets_version

    def _recording(self, left: list[tuple[torch.UntypedStorage, int]]) -> Recording:
        recorder = self.recorder
        assert recorder is not None
        before, state = self._accumulated_but_buckets(), self.state
        state.buckets.place(recorder.all_reduced())
        return Recording(
            graph=recorder.finish(),
            forms=tuple(recorder.saved_forms),
            open_sizes=frozenset(recorder.open_sizes),
            has_backward=recorder.num_unpacks > 0,
            is_typical=not (self.optimizer_ran_inside and state.version != self.state_version),
            gradient_bytes=sum(num_bytes for key, (num_bytes, _) in before.items() if key in recorder.external),
            made_gradients=self._made_gradients(),
            left=left,
            custom_ops=recorder.custom_ops,
            draws_numbers=recorder.draws_numbers,
        )

    def _accumulated_but_buckets(self) -> dict[int, tuple[int, int]]:
        buckets = self.state.buckets.sizes()  # some of which may have been met meanwhile
        return {key: known for key, known in (self.accumulated or {}).items() if key not in buckets}

    def _old_gradients(self) -> OldGradients:
        if self.accumulated is None:
            return OldGradients()
        some_go, before = not self.old_gradients.keys() <= self.accumulated.keys(), self._accumulated_but_buckets()
        added_to = sum(num_bytes for key, (num_bytes, _) in before.items() if key in self._added_to)
        idle = sum(num_bytes for num_bytes, _ in before.values()) - added_to
        in_backward = (Accumulation(idle_bytes=idle, added_to_bytes=added_to),) if before else ()
        return OldGradients(in_backward=in_backward, some_go=some_go)

    def _left_behind(self, baseline: Baseline) -> list[tuple[torch.UntypedStorage, int]]:
        """What it made and left on the device, gradients aside, each with the tick at which a recording saw it made."""
        if self.drops is None or not self._is_like_others:
            baseline.note_unwatched(self.like)
            return []
        gradients = self.state.gradients()
        counter = self.recorder if self.recorder is not None else self.live
        left = [s for s in counter.left_behind() if s._cdata not in gradients] if counter is not None else []
        baseline.note_left(left, self.drops.dropped, self.like)
        made_at = self.recorder.left_at() if self.recorder is not None else {}
        return [(storage, made_at[storage._cdata]) for storage in left if storage._cdata in made_at]

    def _made_gradients(self) -> tuple[StorageRef, ...]:
        if self.recorder is None:
            return ()
        gradients = self.state.gradients()
        return tuple(weakref.ref(s) for s in self.recorder.left_behind() if s._cdata in gradients)

    def _bytes_by_op(self) -> list[int]:
        """By op: the peak since the one before it; empty where nothing counted that, or where the plan explains it.

        What a write has made again early is there because this plan recomputes it: another plan has other values early.
        """
        by_op = self.live.by_op if self.live is not None and not self.executor.has_materialized else None
        return [num_bytes + self.bytes_out_of_sight for num_bytes in by_op or ()]

    def _plain_need(self, swapped_bytes: int) -> tuple[int, int] | None:
        """What it would have needed, had it kept everything, and what was there as it began; None if not known."""
        if self.device_peak_bytes is not None and self.there is not None:
            return self.device_peak_bytes + swapped_bytes - self.there.current_bytes, 0
        if self.device_peak_bytes is None and self.live is not None:
            return self.live.peak_bytes + swapped_bytes - self.live.there_bytes, self.live.there_bytes
        return None

    def _peaks(self) -> Peaks | None:
        live, more_bytes = self.live, self.bytes_out_of_sight
        if self.device_peak_bytes is not None:
            return Peaks(step=self.device_peak_bytes)
        if live is None:
            return None
        return Peaks(
            step=live.peak_bytes + more_bytes,
            forward=live.forward_peak_bytes + more_bytes,
            backward=live.backward_peak_bytes + more_bytes,
        )


def _op_times(entry: PlanEntry, device: torch.device) -> OpTimes | None:
    """What measures the ops of a step under a plan that is not final.

    Workspaces and times are measured in different steps: reading the allocator around each op takes the host longer
    than many an op takes the device, and would be what is measured.
    """
    if entry.phase not in ("verifying", "measuring"):
        return None
    return OpTimes(clock_for(device), op_memory_for(device) if entry.phase == "verifying" else None)


def _counter(entry: PlanEntry, device: torch.device, there: list[torch.UntypedStorage]) -> LiveBytes:
    """What counts live bytes in a step under a plan: measuring what ops allocate within would lengthen them."""
    if entry.phase == "measuring" and entry.graph is not None:
        known = [op.workspace_bytes for op in entry.graph.ops]
        return LiveBytes(device, there, by_op=True, known_workspaces=known)
    return LiveBytes(device, there, by_op=True, workspaces=workspaces_on(device))


def _room_under(plan: MemoryPlan, device: torch.device) -> Callable[[], int] | None:
    """Tells how much of what a plan needs at most is free; None where nothing counts it."""
    memory = memory_of(device)
    if memory is None:
        return None
    return lambda: plan.predicted_peak_bytes - memory.allocated_bytes()


def start_run(
    entry: PlanEntry,
    tiers: Tiers,
    device: torch.device,
    module: torch.nn.Module | None,
    verify: str,
    peaks: DevicePeaks,
    there: There | None,
    gradients: dict[int, int],
    state: PersistentState,
    like: str,
    *,
    is_first_sight: bool,
) -> StepRun:
    """Set up the executor and the observers that a step of this specialization needs now.

    Args:
        entry: The specialization.
        tiers: Where its tensors may go.
        device: Where it runs.
        module: The model, where it is known.
        verify: When replays are compared with their originals.
        peaks: Reads the device's allocator.
        there: What is on the device; None where nobody looked.
        gradients: Those that are there: bytes by identity of the storage.
        state: The state of the training.
        like: What steps share that hold what they leave in the place of what another left, whatever its size.
        is_first_sight: Whether it is the first of its shape.
    """
    program = entry.program
    is_recorded = entry.phase == "recording"
    storages = list(there.storages.values()) if there is not None else []
    recorder = Recorder(device, module, there=storages if there is not None else None) if is_recorded else None
    times = _op_times(entry, device)
    counts = kind_of(device).counts_memory
    can_count = there is not None or counts
    is_watched = recorder is not None or times is not None or entry.begins_counted(can_count=can_count)
    live: LiveBytes | None = None
    if there is not None and recorder is not None:
        live = recorder
    elif there is not None and not counts and is_watched:
        live = _counter(entry, device, storages)
    must_verify = program is not None and program.is_recomputing and verify != "never"
    verifier: Verifier | None = None
    if program is not None and must_verify and (verify == "always" or entry.must_verify):
        trusted = entry.verified if verify == "first" else ()
        verifier = Verifier(tiers, functools.partial(demote, entry), trusted, _room_under(program.plan, device))
    counter = recorder if recorder is not None else live
    observers: list[StepObserver] = [o for o in (counter, times) if o is not None]
    drops = Departures(s for s in storages if s._cdata not in gradients) if observers and there is not None else None
    if drops is not None:
        observers.append(drops)
    # A specialization that has left its plan lately runs under what can give up what the plan keeps.
    is_light = not observers and entry.phase == "planned" and not entry.has_deviated
    # What was never seen may need more than was predicted: then what the plan keeps is given up, too.
    is_sure = entry.family is None or not is_first_sight
    is_imported = isinstance(entry.source, Imported)
    if is_recorded:
        entry.is_seen_by_core = is_seen_by_core(entry, device)
    has_live_scan = is_recorded and there is not None and compiled_code.is_in_use()
    live_scan = frozenset(there.storages) if has_live_scan and there is not None else None  # and holds none of them
    make = functools.partial(StepExecutor, device=device, tiers=tiers, persistent=state.identities, by_mode=is_imported)
    observer = observe_all(tuple(observers))
    is_routed = program is not None and program.form_route is not None
    if program is not None and program.is_keep_all and is_light and is_sure and not is_routed:
        executor = make(
            program=program, observer=None, verifier=None, sees_ops=False, keeps_all=True,
            packs=not entry.elides_hooks(),
        )  # fmt: skip
        is_watched = False
    else:
        planned = program if is_routed or entry.phase not in ("recording", "unplanned") else None
        if is_routed:
            sees_ops, verifier = observer is not None or entry.takes_data, None
        else:
            sees_ops = program is None or program.needs_ops or entry.takes_data or not is_light
        is_watched_by_nobody = observer is None and verifier is None and not is_imported
        core = core_for(planned, device, sees_ops=sees_ops) if planned is not None and is_watched_by_nobody else None
        if planned is not None and core is not None:
            executor = NativeExecutor(
                core, device=device, tiers=tiers, program=planned, sees_ops=sees_ops, persistent=state.identities
            )
        else:
            executor = make(
                program=planned, observer=observer, verifier=verifier, sees_ops=sees_ops, live_scan=live_scan
            )
    if is_watched:
        tiers.take_times()  # forget what went before
        tiers.measure(True)
    run = StepRun(
        entry=entry, device=device, tiers=tiers, executor=executor, recorder=recorder, times=times, live=live,
        drops=drops, verifier=verifier, clock=StepClock(device, is_watched=is_watched), peaks=peaks,
        state=state, is_watched=is_watched, state_version=state.version, buckets_version=state.buckets.version,
        old_gradients=gradients, like=like,
        bytes_out_of_sight=0 if is_recorded else state.buckets.expected_bytes(device),
    )  # fmt: skip
    run.begin()
    return run


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
            more_bytes: What is there and in no live scan.
        """
        self.end_optimizer(is_whole=False)
        self._mode, self._thread = _OptimizerMode(LiveBytes(device, there), more_bytes), threading.get_ident()
        _lay_under_all(self._mode)

    def end_optimizer(self, *, is_whole: bool) -> list[torch.UntypedStorage]:
        """Stop counting, if it was begun.

        Args:
            is_whole: Whether the optimizer's step has ended: not where it failed, or where a backward is inside.

        Returns:
            What it has made so far and holds.
        """
        if self._mode is None or self._thread != threading.get_ident():
            return []  # it is on another thread's stack
        mode, self._mode = self._mode, None
        _take_off(mode)
        if is_whole:
            self.note_optimizer(mode.live.peak_bytes + mode.more_bytes)
        return mode.live.left_behind()

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
