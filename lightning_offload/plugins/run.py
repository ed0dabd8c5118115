"""One step under way: its executor, who watches it, and what is taken over from it at its end."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator

import torch

from lightning_offload.capture.live import LiveBytes
from lightning_offload.capture.recorder import Recorder
from lightning_offload.capture.timing import OpTimes
from lightning_offload.plugins.lifecycle import StepKind
from lightning_offload.plugins.persistent import PersistentState
from lightning_offload.runtime.executor import StepExecutor
from lightning_offload.runtime.host_pool import HostPool
from lightning_offload.runtime.keeping import KeepingExecutor
from lightning_offload.runtime.lanes import Lanes
from lightning_offload.runtime.mode import Executor
from lightning_offload.runtime.verifier import Verifier
from lightning_offload.tensors.observer import StepObserver, observe_all

BytesBeside = Callable[[Iterable[int], torch.device], int]


@dataclasses.dataclass(slots=True)
class StepRun:
    """See the module's docstring.

    Attributes:
        kind: The kind of step.
        device: Where it runs.
        executor: Executes it.
        recorder: Records it, if it is recorded.
        times: Measures its ops, if it runs under a plan that is not final.
        live: Counts live bytes where the device does not.
        verifier: Compares replays, if they are not trusted yet.
        seconds: Time spent in its scopes.
        optimizer_ran_inside: Whether an optimizer updated parameters within its scopes.
        state_version: Version of the persistent state when it began.
        old_gradients: Gradients that were there when it began: bytes by identity of the storage.
        accumulated: Those that were there when its backward began.
        cuda_peak_bytes: The allocator's peak over its scopes.
    """

    kind: StepKind
    device: torch.device
    executor: Executor
    recorder: Recorder | None
    times: OpTimes | None
    live: LiveBytes | None
    verifier: Verifier | None
    seconds: float = 0.0
    optimizer_ran_inside: bool = False
    state_version: int = 0
    old_gradients: dict[int, int] = dataclasses.field(default_factory=dict)
    accumulated: dict[int, int] = dataclasses.field(default_factory=dict)
    cuda_peak_bytes: int | None = None

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """Around each of the step's scopes."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - start
            if self.device.type == "cuda":
                self.cuda_peak_bytes = torch.cuda.max_memory_allocated(self.device)

    def watch_gradients(self, now: dict[int, int], gradients: Callable[[], dict[int, int]]) -> None:
        """Note the gradients of earlier steps: those there now, and those there when backward begins."""
        self.old_gradients = now

        def note() -> None:
            self.accumulated = gradients()

        self.executor.on_backward = note

    def finish(self, state: PersistentState) -> None:
        """Hand what was seen to the kind of step."""
        kind = self.kind
        if not self.executor.num_unpacks and self.recorder is None:
            return
        self._note_peaks(state.bytes_beside)
        accumulated_bytes = sum(self.accumulated.values())
        if self.recorder is not None:
            kind.touched = self.recorder.persistent_ids()
            kind.state_version = -1
            is_typical = not (self.optimizer_ran_inside and state.version != self.state_version)
            kind.recorded(self.recorder, accumulated_bytes, is_typical=is_typical)
            return
        kind.note_gradients(0, accumulated_bytes)
        if self.executor.has_deviated:
            kind.deviated()
            return
        if self.verifier is not None:
            kind.verified |= self.verifier.verified
        if self.times is not None and kind.program is not None and kind.program is self.executor.program:
            kind.measured(self.times)

    def _note_peaks(self, bytes_beside: BytesBeside) -> None:
        kind = self.kind
        if self.cuda_peak_bytes is not None:
            kind.measured_peak_bytes = self.cuda_peak_bytes
        elif self.live is not None:
            persistent = self.live.persistent_storages()
            rest = sum(persistent.values()) + bytes_beside(persistent, self.device)
            old = sum(size for key, size in self.old_gradients.items() if key not in persistent)
            accumulated = sum(size for key, size in self.accumulated.items() if key not in persistent)
            kind.forward_peak_bytes = self.live.forward_peak_bytes + rest + old
            kind.backward_peak_bytes = self.live.backward_peak_bytes + rest + accumulated
            kind.measured_peak_bytes = max(kind.forward_peak_bytes, kind.backward_peak_bytes)


def start_run(
    kind: StepKind,
    device: torch.device,
    lanes: Lanes,
    pool: HostPool,
    module: torch.nn.Module | None,
    verify: str,
) -> StepRun:
    """Set up the executor and the observers that a step of this kind needs now."""
    program = kind.program
    recorder = Recorder(device, module) if kind.phase == "recording" else None
    times = OpTimes() if kind.phase in ("verifying", "measuring") else None
    is_watched = recorder is not None or times is not None or kind.is_due_for_measurement()
    live = LiveBytes(device) if device.type == "cpu" and is_watched else None
    must_verify = program is not None and program.is_recomputing and verify != "never"
    verifier = Verifier(lanes, pool, kind.demote) if must_verify and (verify == "always" or kind.must_verify) else None
    observers: list[StepObserver] = [o for o in (live, recorder, times) if o is not None]
    if program is not None and program.is_keep_all and not observers and kind.phase == "planned":
        return StepRun(kind, device, KeepingExecutor(program), None, None, None, None)
    executor = StepExecutor(
        device=device,
        lanes=lanes,
        pool=pool,
        program=program if kind.phase not in ("recording", "unplanned") else None,
        observer=observe_all(tuple(observers)),
        verifier=verifier,
    )
    return StepRun(kind, device, executor, recorder, times, live, verifier)
