"""SuperNeurons: liveness, a unified tensor pool with an LRU cache, and cost-aware recomputation.

Wang et al., "SuperNeurons: Dynamic GPU Memory Management for Training Deep Neural
Networks", PPoPP 2018, arXiv 1801.04380. Outputs of convolutions may be offloaded, and only when an allocation would
fail: the cache evicts the least recently used. Outputs of layers that are cheap to compute are dropped and recomputed
from the checkpoint before them. Checkpoints are convolutions, fully connected layers, softmax, forks, joins and
concatenations. A segment between checkpoints is recomputed once and kept if it fits into the largest memory that any
one layer needs (speed-centric), else anew for each layer (memory-centric).

Departures. Liveness is what autograd does. A layer's output is a saved storage, of the kind of the heaviest op since
the saved storages before it (:mod:`~.layers`): where a network saves the activation function of a convolution instead
of the convolution's own result, that one is the checkpoint. A fork is a result with several readers. Fused attention,
products of activations and recurrent layers are checkpoints as well. Layers that cannot be replayed stay. The cache
is decided before the step: as a step reads outputs in order, the least recently used ones are the first of them, so a
prefix is evicted and the rest is never transferred. Which, is what is fastest within the budget: of the outputs of
convolutions, as in the paper, or of all checkpoints, since a transformer has no convolutions; with what is cheap
recomputed or, under a budget, kept. With a host of limited size what there is no room for is not evicted. Workspaces
and algorithms of convolutions are cuDNN's.
"""

from __future__ import annotations

from lightning_offload.graph.memory_plan import Action, MemoryPlan
from lightning_offload.planning.policies.fitting import Fitting, Ordered, fit_host
from lightning_offload.planning.policies.kinds import DEAR, Kind
from lightning_offload.planning.policies.layers import Layer, Layers, layers_of
from lightning_offload.planning.request import PlanRequest

_CHECKPOINTS = (*DEAR, Kind.SOFTMAX)


def superneurons(request: PlanRequest) -> MemoryPlan:
    """Recompute what is cheap, and evict as many checkpoints as the budget asks for."""
    layers, fitting = layers_of(request.problem), Fitting(request, "superneurons")
    recompute, no_memo = cost_aware(layers)
    actions: dict[int, Action] = dict.fromkeys(recompute, "recompute")
    outputs = [s for s in layers.swappable() if is_checkpoint(layers.by_storage[s])]
    outputs.sort(key=lambda s: layers.by_storage[s].last_used)
    for evicted in (outputs, [s for s in outputs if layers.by_storage[s].kind is Kind.CONV]):
        order: Ordered = [(s, "swap") for s in fit_host(request, evicted, recompute)]
        fitting.prefixes(order, actions, no_memo)
        if request.budget_bytes is not None:
            fitting.prefixes(order)
    return fitting.plan()


def is_checkpoint(layer: Layer) -> bool:
    """Whether a layer's output is kept or offloaded, never recomputed."""
    return layer.kind in _CHECKPOINTS or len(layer.readers) > 1 or not layer.can_recompute


def segments(layers: Layers) -> list[list[int]]:
    """Storages of successive layers between checkpoints."""
    found: list[list[int]] = [[]]
    for s, layer in layers.by_storage.items():
        if not is_checkpoint(layer):
            found[-1].append(s)
        elif found[-1]:
            found.append([])
    return [segment for segment in found if segment]


def cost_aware(layers: Layers) -> tuple[list[int], frozenset[int]]:
    """Storages that are recomputed, and those of them that are recomputed anew for each layer."""
    most = layers.working_set_bytes()
    all_segments = segments(layers)
    too_large = [g for g in all_segments if sum(layers.by_storage[s].num_bytes for s in g) > most]
    return [s for g in all_segments for s in g], frozenset(s for g in too_large for s in g)
