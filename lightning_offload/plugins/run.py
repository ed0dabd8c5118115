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
from lightning_offload.runtime.executor import StepExecutor
from lightning_offload.runtime.host_pool import HostPool
from lightning_offload.runtime.lanes import Lanes
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
        cuda_peak_bytes: The allocator's peak over its scopes.
    """

    kind: StepKind
    device: torch.device
    executor: StepExecutor
    recorder: Recorder | None
    times: OpTimes | None
    live: LiveBytes | None
    verifier: Verifier | None
    seconds: float = 0.0
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

    def finish(self, bytes_beside: BytesBeside) -> None:
        """Hand what was seen to the kind of step."""
        kind = self.kind
        if not self.executor.num_unpacks and self.recorder is None:
            return
        self._note_peaks(bytes_beside)
        if self.recorder is not None:
            kind.touched = frozenset(self.recorder.persistent_ids())
            kind.state_version = -1
            kind.recorded(self.recorder)
        elif self.executor.has_deviated:
            kind.deviated()
        elif self.times is not None and kind.program is self.executor.program:
            trusted = {s for s, d in self.executor.decisions.items() if d.action == "recompute"}
            mismatched = self.verifier.mismatched if self.verifier is not None else set()
            kind.measured(self.times, trusted if self.verifier is not None else set(), mismatched)

    def _note_peaks(self, bytes_beside: BytesBeside) -> None:
        kind = self.kind
        if self.cuda_peak_bytes is not None:
            kind.measured_peak_bytes = self.cuda_peak_bytes
        elif self.live is not None:
            persistent = self.live.persistent_storages()
            rest = sum(persistent.values()) + bytes_beside(persistent, self.device)
            kind.measured_peak_bytes = self.live.peak_bytes + rest
            kind.forward_peak_bytes = self.live.forward_peak_bytes + rest
            kind.backward_peak_bytes = self.live.backward_peak_bytes + rest


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
    is_watched = recorder is not None or times is not None or program is None or not program.is_keep_all
    live = LiveBytes(device) if device.type == "cpu" and is_watched else None
    must_verify = program is not None and program.is_recomputing and verify != "never"
    verifier = Verifier(lanes, pool) if must_verify and (verify == "always" or kind.must_verify) else None
    observers: list[StepObserver] = [o for o in (live, recorder, times) if o is not None]
    executor = StepExecutor(
        device=device,
        lanes=lanes,
        pool=pool,
        program=program if kind.phase not in ("recording", "unplanned") else None,
        observer=observe_all(tuple(observers)),
        verifier=verifier,
    )
    return StepRun(kind, device, executor, recorder, times, live, verifier)
