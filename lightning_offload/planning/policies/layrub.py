"""Layrub: reuse of memory within a layer and between layers.

Jin et al., "Layer-Centric Memory Reuse and Data Migration for Extreme-Scale Deep Learning on
Many-Core Architectures", ACM TACO 15(3), 2018, DOI 10.1145/3243904. Between layers: what no layer of forward reads any
more is moved to the host, and brought back while the layer before it in backward runs; a few buffers of the largest
size are reused by all. Within a layer: the gradient of the activation overwrites the activation.

Departures. Reuse within a layer needs no plan here: autograd drops a saved tensor as soon as its node has run, and
the caching allocator hands its memory on; the paper's masks of eight bits for ReLU are not made, since PyTorch's ReLU
saves its result, which the next layer saves anyway. Between layers: buffers are those of the allocator, and "a few
are reused" is that a copy out may take one layer longer than the last one that reads the storage, which the layer
after that waits for. The copy begins when the storage is saved, before its references are gone. A storage that
backward needs before that stays, and so does one that a host of limited size has no room for, later layers first.
Under a budget as many layers, from the first on, are moved out as is fastest within it; the paper moves all.
"""

from __future__ import annotations

from lightning_offload.graph.memory_plan import MemoryPlan
from lightning_offload.planning.policies.schedules import by_layers
from lightning_offload.planning.request import PlanRequest


def layrub(request: PlanRequest) -> MemoryPlan:
    """Move out all that forward is done with, and bring it back a layer ahead."""
    return by_layers(request, "layrub", num_later=1)
