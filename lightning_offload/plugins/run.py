"""One step under way: its executor, who watches it, and what is taken over from it at its end."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator

import torch

from lightning_offload.capture.live import Census, LiveBytes
from lightning_offload.capture.recorder import Recorder
from lightning_offload.capture.timing import OpTimes, clock_for
from lightning_offload.capture.workspace import op_memory_for
from lightning_offload.graph.memory_plan import Tier
from lightning_offload.plugins.lifecycle import StepKind
from lightning_offload.plugins.peaks import DevicePeaks
from lightning_offload.plugins.persistent import PersistentState
from lightning_offload.plugins.step_clock import StepClock
from lightning_offload.runtime.executor import Executor, KeepingExecutor, StepExecutor
from lightning_offload.runtime.lanes import LaneTimes
from lightning_offload.runtime.tiers import Tiers
from lightning_offload.runtime.verifier import Verifier
from lightning_offload.tensors.observer import StepObserver, observe_all


@dataclasses.dataclass(slots=True)
class StepRun:
    """See the module's docstring.

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
        is_watched: Whether its memory, its ops or its copies are measured.
        lane_times: What the lanes did, if that was measured.
        seconds: Time spent in its scopes, once it is finished and if that was measured.
    """

    kind: StepKind
    device: torch.device
    tiers: Tiers
    executor: Executor
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
    lane_times: dict[Tier, LaneTimes] | None = None
    seconds: float | None = None

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """Around each of the step's scopes."""
        with self.clock.running():
            try:
                yield
            finally:
                if self.is_watched:
                    self._note_device_peak()

    def _note_device_peak(self) -> None:
        peak = self.peaks.end_scope(self.device)
        if peak is None:
            return
        for observer in (self.recorder, self.times):  # they reset the allocator's peak for each op
            peak = max(peak, (observer.peak_bytes or 0) if observer is not None else 0)
        self.device_peak_bytes = max(self.device_peak_bytes or 0, peak)

    @property
    def stall_seconds(self) -> float:
        """Time that compute waited for copies, as far as it was measured."""
        times = (self.lane_times or {}).values()
        return self.executor.stall_seconds + sum(t.stall_seconds for t in times)

    def watch_gradients(self, now: dict[int, int], gradients: Callable[[], dict[int, int]]) -> None:
        """Note the gradients of earlier steps: those there now, and those there when backward begins."""
        self.old_gradients = now

        def note() -> None:
            self.accumulated = gradients()

        self.executor.on_backward = note

    def finish(self, state: PersistentState, budget_bytes: int | None) -> None:
        """Hand what was seen to the kind of step.

        Args:
            state: What is on the device beside the steps.
            budget_bytes: The budget.
        """
        kind = self.kind
        self._take_times()
        if isinstance(self.executor, StepExecutor) and self.executor.program is None:
            kind.swapped_bytes, kind.stayed_bytes = self.executor.swapped_bytes, self.executor.stayed_bytes
        if not self.executor.num_unpacks and self.recorder is None:
            return
        self._note_peaks()
        accumulated_bytes = sum(self.accumulated.values())
        if self.recorder is not None:
            state.buckets.place(self.recorder.all_reduced())
            kind.state_version = -1
            is_typical = not (self.optimizer_ran_inside and state.version != self.state_version)
            kind.recorded(self.recorder, self.live, self.old_gradients, accumulated_bytes, is_typical=is_typical)
            return
        kind.note_gradients(0, accumulated_bytes)
        if self.executor.has_deviated:
            kind.deviated(self.executor.deviation)
            return
        if self.executor.unforeseen_bytes:
            kind.surprised()
        if self.verifier is not None:
            kind.verified |= self.verifier.verified
        if self.live is not None:
            kind.learn_known(self.live, self.old_gradients)
        if kind.program is not self.executor.program:
            return
        if self.times is not None:
            kind.measured(self.times)
        elif self.is_watched:
            kind.check_peak(budget_bytes)

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


def _op_times(kind: StepKind, device: torch.device) -> OpTimes | None:
    """What measures the ops of a step under a plan that is not final.

    Workspaces and times are measured in different steps: reading the allocator around each op takes the host longer
    than many an op takes the device, and would be what is measured.
    """
    if kind.phase not in ("verifying", "measuring"):
        return None
    return OpTimes(clock_for(device), op_memory_for(device) if kind.phase == "verifying" else None)


def start_run(
    kind: StepKind,
    tiers: Tiers,
    device: torch.device,
    module: torch.nn.Module | None,
    verify: str,
    peaks: DevicePeaks,
    there: Census | None,
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
    """
    program = kind.program
    recorder = Recorder(device, module) if kind.phase == "recording" else None
    times = _op_times(kind, device)
    is_on_cpu = device.type == "cpu"
    can_count = there is not None or not is_on_cpu
    is_watched = recorder is not None or times is not None or kind.is_due_for_measurement(can_count=can_count)
    is_counted = there is not None and ((is_on_cpu and is_watched) or recorder is not None)
    live = LiveBytes(device, there.values()) if there is not None and is_counted else None
    must_verify = program is not None and program.is_recomputing and verify != "never"
    verifier: Verifier | None = None
    if must_verify and (verify == "always" or kind.must_verify):
        verifier = Verifier(tiers, kind.demote, kind.verified if verify == "first" else ())
    observers: list[StepObserver] = [o for o in (live, recorder, times) if o is not None]
    executor: Executor
    # A kind of step that has left its plan before runs under what can give up what the plan keeps.
    is_light = not observers and kind.phase == "planned" and not kind.num_deviations
    if program is not None and program.is_keep_all and is_light:
        executor, is_watched = KeepingExecutor(program), False
    else:
        executor = StepExecutor(
            device=device,
            tiers=tiers,
            program=program if kind.phase not in ("recording", "unplanned") else None,
            observer=observe_all(tuple(observers)),
            verifier=verifier,
        )
    if is_watched:
        tiers.take_times()  # forget what went before
        tiers.measure(True)
    return StepRun(
        kind=kind, device=device, tiers=tiers, executor=executor, recorder=recorder, times=times, live=live,
        verifier=verifier, clock=StepClock(device, is_watched=is_watched), peaks=peaks, is_watched=is_watched,
    )  # fmt: skip
