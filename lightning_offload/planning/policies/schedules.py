"""Release and prefetch as systems with a rigid discipline do them, layer by layer, whatever the links allow.

A copy out begins when its storage is first saved, which is before the op that reads it runs, and is waited for at
the end of a layer after the last one that reads it. A copy back is issued when a node of backward begins, and
waited for by the node that needs it. Ops of views end no layer.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from lightning_offload.graph.memory_plan import Action, MemoryPlan
from lightning_offload.planning.policies.fitting import Fitting, Tried, fit_host, swap
from lightning_offload.planning.policies.kinds import Kind
from lightning_offload.planning.policies.layers import Layer, Layers, layers_of
from lightning_offload.planning.request import PlanRequest
from lightning_offload.planning.simulator import Actions, Schedule


def release_at(layers: Layers, layer: Layer, num_later: int = 0) -> int | None:
    """The op of forward before which a device copy is released, as a tick; None where forward is over by then.

    Args:
        layers: The step.
        layer: What is swapped.
        num_later: How many more layers its copy may take beyond the last one that reads it.
    """
    i = int(np.searchsorted(layers.forward_ticks, layer.last_used, side="right")) + num_later
    return int(layers.forward_ticks[i]) if i < len(layers.forward_ticks) else None


def releases(layers: Layers, storages: Collection[int], actions: Actions, num_later: int = 0) -> dict[int, int]:
    """Release ticks of those storages that forward can release before backward needs them: the others must stay."""
    needs = layers.needs(actions)
    ticks = {s: release_at(layers, layers.by_storage[s], num_later) for s in storages}
    return {s: tick for s, tick in ticks.items() if tick is not None and tick < needs[s]}


def one_ahead(layers: Layers, release: Mapping[int, int], actions: Actions) -> Schedule:
    """Each node of backward, when it begins, brings back what the next node needs.

    Args:
        layers: The step.
        release: By swapped storage: its release.
        actions: What is done with all storages.
    """
    needs, prefetch = layers.needs(actions), dict[int, int]()
    for s in release:
        i = layers.node_at(needs[s])
        if i > 0:
            prefetch[s] = layers.nodes[i - 1].ordinal
    return Schedule(release=release, prefetch=prefetch)


def nearest_ahead(layers: Layers, release: Mapping[int, int], actions: Actions, stop: Kind) -> Schedule:
    """Each node brings back what the nearest node after it needs that is not on its way, if no ``stop`` lies between.

    Args:
        layers: The step.
        release: By swapped storage: its release.
        actions: What is done with all storages.
        stop: A node of this kind ends the search, after what it needs itself.
    """
    needs, wanted = layers.needs(actions), dict[int, list[int]]()
    for s in release:
        wanted.setdefault(layers.node_at(needs[s]), []).append(s)
    prefetch: dict[int, int] = {}
    nodes, found = layers.nodes, 0
    for i, node in enumerate(nodes):
        found = max(found, i)  # all up to this node are on their way, or came on demand
        while found + 1 < len(nodes):
            if found > i and nodes[found].kind is stop:
                break
            found += 1
            if found in wanted:
                prefetch.update((s, node.ordinal) for s in wanted[found])
                break
    return Schedule(release=release, prefetch=prefetch)


def by_layers(request: PlanRequest, policy: str, again: Sequence[int] = (), num_later: int = 0) -> MemoryPlan:
    """The plan of a policy that swaps or recomputes layers from the first on, as many as are fastest within the budget.

    Args:
        request: The step and its budget.
        policy: Whose plan it is.
        again: Storages that are recomputed; all others that can be are swapped, and come back one layer ahead.
        num_later: How many more layers a copy out may take beyond the last one that reads its storage.
    """
    layers, recomputed = layers_of(request.problem), set(again)
    swappable = fit_host(request, (s for s in layers.swappable() if s not in recomputed), again)
    treatable = recomputed.union(swappable)
    storages = [s for s in layers.by_storage if s in treatable]

    def first(num: int) -> Tried:
        treated = set(storages[:num])
        actions: dict[int, Action] = {s: "recompute" for s in again if s in treated}
        release = releases(layers, [s for s in swappable if s in treated], actions, num_later)
        actions |= swap(release)
        return Tried(actions=actions, schedule=one_ahead(layers, release, actions))

    return Fitting(request, policy).up_to(len(storages), first).plan()
