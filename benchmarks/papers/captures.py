"""Training steps of our models on the papers' GPUs, recorded under FakeTensorMode, for any batch size from two.

Two recordings give the step at all other sizes (:mod:`~lightning_offload.planning.step_model`). The state that outlives
a step counts in full: parameters, gradients and the momentum of SGD.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from examples.models import Example
from lightning_offload.graph.catalog import device_spec
from lightning_offload.graph.device_spec import DeviceSpec
from lightning_offload.graph.step_graph import StepGraph
from lightning_offload.planning.step_model import StepModel
from lightning_offload.plugins.fake import record_fake_step

GIB = 1 << 30
HOST_BYTES = 100 * GIB
"""What may be swapped to: the papers' machines are not always described, so all have the same host."""
CONTEXT_BYTES = GIB // 2
"""Assumed of a process on a GPU beside its tensors: the driver's context and the libraries' loaded kernels."""
WORKSPACE_BYTES = GIB // 2
"""Assumed of the kernels that run at the peak; together with the context it is what a default budget leaves free."""
FRAGMENTATION = 0.05
"""Assumed share of an allocator's memory that lies between blocks."""


def room_bytes(spec: DeviceSpec) -> int:
    """Return what tensors may take on a GPU: its memory without context, workspaces and what lies between blocks.

    The papers' figures were of whole processes on real cards, so ours have to leave that much, plain PyTorch's too.
    """
    return int((memory_bytes(spec) - CONTEXT_BYTES - WORKSPACE_BYTES) * (1 - FRAGMENTATION))


def process_bytes(tensor_bytes: int) -> int:
    """Return what a process takes of a GPU whose tensors take so much."""
    return round(tensor_bytes / (1 - FRAGMENTATION)) + CONTEXT_BYTES + WORKSPACE_BYTES


def tensor_bytes(process_bytes: int) -> int:
    """Return what the tensors may take of a process that takes so much: the inverse of :func:`process_bytes`."""
    return max(0, int((process_bytes - CONTEXT_BYTES - WORKSPACE_BYTES) * (1 - FRAGMENTATION)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """A step, and the bytes of the model's parameters."""

    graph: StepGraph
    parameter_bytes: int


def device(name: str) -> DeviceSpec:
    """Return a GPU of the catalogue with the host that all rows have."""
    return dataclasses.replace(device_spec(name), host_memory_bytes=HOST_BYTES)


def memory_bytes(spec: DeviceSpec) -> int:
    """Return the memory of a GPU of the catalogue, all of which are known."""
    if spec.memory_bytes is None:
        raise ValueError(f"the memory of {spec.name} is not known")
    return spec.memory_bytes


def record(example: Example, batch_size: int, spec: DeviceSpec) -> Recorded:
    """Record a step with momentum SGD's state."""
    models: list[nn.Module] = []

    def build() -> tuple[nn.Module, Callable[[], None]]:
        model, step = example.step(batch_size)()
        models.append(model)
        return model, step

    graph = record_fake_step(build, spec)
    parameter_bytes = sum(p.numel() * p.element_size() for p in models[0].parameters())
    graph = dataclasses.replace(graph, extra_bytes=graph.extra_bytes + parameter_bytes)
    return Recorded(graph=graph, parameter_bytes=parameter_bytes)


class Family:
    """The steps of a model at all batch sizes.

    Args:
        example: The model.
        spec: The GPU.
        batch_sizes: The two that are recorded; best near those of interest.

    Raises:
        TuningError: Their steps are not alike.
    """

    def __init__(self, example: Example, spec: DeviceSpec, batch_sizes: tuple[int, int]) -> None:
        self.example = example
        self.spec = spec
        self.batch_sizes = batch_sizes
        recorded = {size: record(example, size, spec) for size in batch_sizes}
        self._model = StepModel.fit({size: step.graph for size, step in recorded.items()})
        self.parameter_bytes = recorded[batch_sizes[0]].parameter_bytes

    def at(self, batch_size: int) -> StepGraph:
        """Return the step at a batch size, from the two recordings."""
        return self._model.at(batch_size)

    def recorded_at(self, batch_size: int) -> StepGraph:
        """Return the step recorded at that batch size itself."""
        return record(self.example, batch_size, self.spec).graph
