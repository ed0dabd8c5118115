"""Records a step that does not run: FakeTensors in, the same graph out, for any device, without its memory.

The tensors are a CPU's. For a GPU the step calls CUDA's kernels on them (:mod:`~lightning_offload.capture.cuda`), and
sizes and replays are judged as on CUDA: the graph is that of the step there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from typing_extensions import override

from lightning_offload.accelerators import HOST, KINDS
from lightning_offload.capture.cuda import recurrent
from lightning_offload.capture.cuda.autocast import casting
from lightning_offload.capture.cuda.choices import choosing
from lightning_offload.capture.cuda.flex import fused, op_by_op
from lightning_offload.capture.cuda.kernels import CudaKernels
from lightning_offload.capture.cuda.programs import on_the_gpu
from lightning_offload.capture.known_values import KnownValues, seen_by_transformers
from lightning_offload.capture.recorder import Recorder
from lightning_offload.capture.roofline import Work, work_of
from lightning_offload.graph.device_spec import DeviceSpec
from lightning_offload.graph.step_graph import StepGraph
from lightning_offload.runtime.executor import StepExecutor
from lightning_offload.runtime.hooks import executing
from lightning_offload.runtime.host_pool import HostBlock, HostPool
from lightning_offload.runtime.lanes import FakeLanes
from lightning_offload.runtime.tiers import Tiers
from lightning_offload.tensors.op_facts import OpFacts

Step = Callable[[], None]

_LOCK = threading.Lock()
"""Held while functions of torch and of transformers are replaced: one recording at a time."""
_USUAL_CAPABILITY = 80
"""Taken where a GPU's own compute capability is not known: an A100's, from which on kernels differ little."""


@dataclasses.dataclass(frozen=True, slots=True)
class FakeStep:
    """A step that was recorded without running.

    Attributes:
        graph: The step, in which no op takes any time.
        work: What each op has to do.
    """

    graph: StepGraph
    work: tuple[Work, ...]

    def on(self, device: DeviceSpec) -> StepGraph:
        """The step on a device, each op priced by :meth:`DeviceSpec.work_seconds`."""
        ops = zip(self.graph.ops, self.work, strict=True)
        return dataclasses.replace(
            self.graph, ops=tuple(dataclasses.replace(op, seconds=work.seconds(device)) for op, work in ops)
        )


def record_fake_step(build: Callable[[], tuple[torch.nn.Module, Step]], device: DeviceSpec) -> StepGraph:
    """Record one forward and backward under FakeTensorMode, for one device; cf. :func:`record_fake`."""
    return record_fake(build, device).on(device)


def record_fake(build: Callable[[], tuple[torch.nn.Module, Step]], device: DeviceSpec | None = None) -> FakeStep:
    """Record one forward and backward under FakeTensorMode.

    Args:
        build: Makes the model and its step (forward and backward on tensors it makes itself); called under
            FakeTensorMode, so it costs no memory whatever the sizes.
        device: Whose kernels the step calls; a CPU's by default. Times are not its: cf. :meth:`FakeStep.on`.
    """
    work: list[Work] = []

    def price(facts: OpFacts, args: Any, kwargs: Any, out: Any) -> float:
        work.append(work_of(facts, args, kwargs, out))
        return 0.0  # not known yet

    kind = HOST if device is None else KINDS.get(device.kind, HOST)
    with _LOCK, FakeTensorMode(allow_non_fake_inputs=True), KnownValues(), _kernels_of(device):
        module, step = build()
        if kind is not HOST:
            recurrent.flatten(module)
        recorder = Recorder(torch.device("cpu"), module, price, kind=kind)
        executor = StepExecutor(
            device=torch.device("cpu"),
            tiers=Tiers(FakeLanes(), _FakePool()),
            program=None,
            observer=recorder,
            verifier=None,
        )
        executor.on_backward = lambda: recorder.watch_gradients(())
        with executing(executor), seen_by_transformers(), op_by_op():
            step()
        return FakeStep(recorder.finish(), tuple(work))


@contextlib.contextmanager
def _kernels_of(device: DeviceSpec | None) -> Iterator[None]:
    """Inside, what runs on fake CPU tensors runs as on a device."""
    if device is None or device.kind != "cuda":
        yield
        return
    capability = device.compute_capability or _USUAL_CAPABILITY
    with on_the_gpu(), casting(), choosing(capability), fused(), CudaKernels():
        yield


class _FakePool(HostPool):
    """Blocks that nothing is copied to."""

    @override
    def allocate(self, num_bytes: int, at: int | None = None, *, is_spare: bool = False) -> HostBlock | None:
        return super().allocate(1)
