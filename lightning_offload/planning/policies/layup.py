"""Layup: each type of layer gets what suits it, a transfer or a recomputation.

Jiang, Ma, Liu, Liu, Zhou, Zhu, Wu, Jin, "Layup: Layer-adaptive and Multi-type Intermediate-oriented Memory
Optimization for GPU-based CNNs", ACM TACO 16(4), 2019, DOI 10.1145/3357238. Convolutions and fully connected layers
are cheaper to transfer than to run twice, for all other layers it is the reverse: transfer the former, recompute or
overwrite in place activation functions, dropout and normalization.

Departures. Fused attention, products of two activations and recurrent layers count as layers worth a transfer, and
so do sums and concatenations: recomputed, a residual network's sums would chain back to its input. What cannot be
replayed is transferred, what cannot be transferred is replayed if it can be, and what a host of limited size has no
room for (later layers first) stays. cuDNN's workspaces are cuDNN's. A copy out is waited for one layer after the last
that reads the storage, and a copy back is issued a layer ahead, as in Layrub by the same group. Under a budget as many
layers, from the first on, are treated so as is fastest within it; the paper treats all.
"""

from __future__ import annotations

from lightning_offload.graph.memory_plan import MemoryPlan
from lightning_offload.planning.policies.kinds import DEAR
from lightning_offload.planning.policies.layers import Layer, layers_of
from lightning_offload.planning.policies.schedules import by_layers
from lightning_offload.planning.request import PlanRequest


def layup(request: PlanRequest) -> MemoryPlan:
    """Transfer what is dear to compute, recompute the rest."""
    again = [s for s, layer in layers_of(request.problem).by_storage.items() if _is_recomputed(layer)]
    return by_layers(request, "layup", again, num_later=1)


def _is_recomputed(layer: Layer) -> bool:
    return layer.can_recompute and (layer.kind not in DEAR or not layer.can_swap)
