"""Records a step that does not run: FakeTensors in, the same graph out, for any device, without its memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from typing_extensions import override

from lightning_offload.capture.recorder import Recorder
from lightning_offload.capture.roofline import Work, WorkMeter
from lightning_offload.graph.device_spec import DeviceSpec
from lightning_offload.graph.step_graph import StepGraph
from lightning_offload.runtime.executor import StepExecutor
from lightning_offload.runtime.hooks import executing
from lightning_offload.runtime.host_pool import HostBlock, HostPool
from lightning_offload.runtime.lanes import FakeLanes
from lightning_offload.runtime.tiers import Tiers

Step = Callable[[], None]


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
    return record_fake(build).on(device)


def record_fake(build: Callable[[], tuple[torch.nn.Module, Step]]) -> FakeStep:
    """Record one forward and backward under FakeTensorMode.

    Args:
        build: Makes the model and its step (forward and backward on tensors it makes itself); called under
            FakeTensorMode, so it costs no memory whatever the sizes.

    Returns:
        The step, on fake CPU tensors: CUDA runs other kernels for some ops (dropout, attention).
    """
    meter = WorkMeter()
    with FakeTensorMode(allow_non_fake_inputs=True):
        module, step = build()
        recorder = Recorder(torch.device("cpu"), module, meter)
        executor = StepExecutor(
            device=torch.device("cpu"),
            tiers=Tiers(FakeLanes(), _FakePool()),
            program=None,
            observer=recorder,
            verifier=None,
        )
        with executing(executor):
            step()
        return FakeStep(recorder.finish(), tuple(meter.work))


class _FakePool(HostPool):
    """Blocks that nothing is copied to."""

    @override
    def allocate(self, num_bytes: int, at: int | None = None, *, is_spare: bool = False) -> HostBlock | None:
        return super().allocate(1)
