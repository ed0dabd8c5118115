"""Capuchin: swap what has time to be swapped, then whichever of swapping and recomputing is cheaper.

Peng, Shi, Dai, Jin, Ma, Xiong, Yang, Qian, "Capuchin: Tensor-based GPU Memory Management for Deep Learning", ASPLOS
2020, DOI 10.1145/3373376.3378505. From the accesses to tensors in a measured step: a tensor's free time is the time
between its last access in forward and its first in backward, less its copies out and back. Tensors are swapped in the
order of their free time while that hides the copies, which take turns on the link. If that does not suffice, the rest
is swapped or recomputed, whichever costs less for the bytes: the swap what its copies exceed its free time by, the
recomputation what its memory saved per second (MSPS) says, which counts the recomputation of sources that are
themselves recomputed. Copies back are triggered by an earlier access, and moved forward as long as they come too
late.

Departures. Tensors are saved storages. The paper finds triggers from feedback over several steps; here the simulator
places each by its need and the lanes' load. Once no copy can be hidden any more, one that has free time of its own is
priced at its copy back, since it delays others by that. The number of tensors is that prefix of the order that is
fastest when simulated within the budget, where the paper counts bytes. Without a budget nothing is done. On a host of
limited size what there is no room for is recomputed if it can be, else it stays. Copies to a disk are priced at the
link's rates.
"""

from __future__ import annotations

import heapq

from lightning_offload.graph.memory_plan import Action, MemoryPlan
from lightning_offload.planning.links import in_rates, out_rates
from lightning_offload.planning.policies.fitting import Fitting, Ordered, fit_host
from lightning_offload.planning.policies.layers import Layer, Layers, layers_of
from lightning_offload.planning.request import PlanRequest


def capuchin(request: PlanRequest) -> MemoryPlan:
    """Swap by free time, then take the cheaper action by bytes."""
    return Fitting(request, "capuchin").prefixes(eviction_order(request)).plan()


def eviction_order(request: PlanRequest) -> Ordered:
    """What is done with which storage, first what is hidden, then what is cheapest."""
    layers, device = layers_of(request.problem), request.device
    free = {s: free_seconds(request, layers, layers.by_storage[s]) for s in layers.swappable()}
    by_free_time = sorted(free, key=lambda s: (-free[s], s))
    replayable = [s for s, layer in layers.by_storage.items() if layer.can_recompute]
    with_room = fit_host(request, by_free_time, replayable)
    hidden = with_room[: _num_hidden(request, layers, with_room)]
    back = in_rates(device).link
    exposed = {s: max(-free[s], layers.by_storage[s].num_bytes * back) for s in with_room[len(hidden) :]}
    return [*((s, "swap") for s in hidden), *_cheapest_first(layers, set(hidden), exposed)]


def free_seconds(request: PlanRequest, layers: Layers, layer: Layer) -> float:
    """Time between a layer's last use in forward and its first in backward that its copies leave."""
    copies = layer.num_bytes * (out_rates(request.device).link + in_rates(request.device).link)
    return layers.away_seconds(layer) - copies


def _num_hidden(request: PlanRequest, layers: Layers, storages: list[int]) -> int:
    """How many of some storages can be swapped, the first ones first, so that each copy is hidden on its lane."""
    low, high = 0, len(storages)
    while low < high:
        middle = (low + high + 1) // 2
        if _is_hidden(request, [layers.by_storage[s] for s in storages[:middle]], layers):
            low = middle
        else:
            high = middle - 1
    return low


def _is_hidden(request: PlanRequest, swapped: list[Layer], layers: Layers) -> bool:
    """Whether each copy back can begin after its copy out has ended, and end before it is needed."""
    out, back = out_rates(request.device).link, in_rates(request.device).link
    out_end, end = dict[int, float](), 0.0
    for layer in sorted(swapped, key=lambda layer: (layer.last_used, layer.storage)):
        end = max(end, float(layers.starts[layer.last_used + 1])) + layer.num_bytes * out
        out_end[layer.storage] = end
    begin = float("inf")
    for layer in sorted(swapped, key=lambda layer: (-layer.first_unpack, layer.storage)):
        begin = min(begin, float(layers.starts[layer.first_unpack])) - layer.num_bytes * back
        if begin < out_end[layer.storage]:
            return False
    return True


def _cheapest_first(layers: Layers, taken: set[int], exposed: dict[int, float]) -> Ordered:
    """Greedily by cost per byte; recomputing a storage makes what reads it dearer to recompute."""
    read_by: dict[int, list[int]] = {}
    for s, layer in layers.by_storage.items():
        for source in layer.sources:
            read_by.setdefault(source, []).append(s)
    replay = {s: layer.seconds for s, layer in layers.by_storage.items() if layer.can_recompute}

    def price(s: int) -> tuple[float, Action]:
        swap, again = exposed.get(s, float("inf")), replay.get(s, float("inf"))
        return (again, "recompute") if again < swap else (swap, "swap")

    rest = [s for s in layers.by_storage if s not in taken and (s in exposed or s in replay)]
    heap = [(price(s)[0] / layers.by_storage[s].num_bytes, s) for s in rest]
    heapq.heapify(heap)
    order: list[tuple[int, Action]] = []
    while heap:
        per_byte, s = heapq.heappop(heap)
        cost, action = price(s)
        if cost / layers.by_storage[s].num_bytes > per_byte:
            heapq.heappush(heap, (cost / layers.by_storage[s].num_bytes, s))
            continue
        order.append((s, action))
        if action == "recompute":
            for reader in read_by.get(s, ()):
                if reader in replay:
                    replay[reader] += replay[s]
    return order
