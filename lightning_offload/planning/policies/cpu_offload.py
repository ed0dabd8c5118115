"""CPU offloading with one layer of lookahead.

Hascoet, Zhuang, Febvre, Ariki, Takiguchi, "Reducing the Memory Cost of Training Convolutional Neural Networks by
CPU Offloading", JSEA 12(8), 2019, DOI 10.4236/jsea.2019.128019. Every layer's input goes to pinned memory while that
layer computes; its end waits for both, and frees the input. In backward, a layer first issues the copy back of what
the layer after it in backward needs, then waits for its own.

Departures. A layer is an op that makes something, an input a saved storage; saved outputs and statistics are
offloaded too, since autograd would hold them. A storage that backward needs before the layer could end stays, and so
does one that a host of limited size has no room for, later layers first. Under a budget as many layers are offloaded,
from the first on, as is fastest within it; the paper offloads all. Nothing is recomputed.
"""

from __future__ import annotations

from lightning_offload.graph.memory_plan import MemoryPlan
from lightning_offload.planning.policies.schedules import by_layers
from lightning_offload.planning.request import PlanRequest


def cpu_offload(request: PlanRequest) -> MemoryPlan:
    """Offload every layer, wait at its end, and look one layer ahead in backward."""
    return by_layers(request, "cpu-offload")
