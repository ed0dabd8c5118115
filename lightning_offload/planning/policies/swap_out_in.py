"""Swap-out and swap-in of feature maps by a rewritten graph, and recomputed attention sums.

Meng, Sun, Yang, Qiu, Gu, "Training Deeper Models by GPU Memory Optimization on TensorFlow", ML Systems workshop at
NIPS 2017. Edges from forward to backward are cut and get a swap-out and a swap-in. Which, follows from a threshold of
memory: going back through the forward graph, maps stay as long as they fit, so those that live shortest stay and
those that live longest are swapped. A swap-in is triggered as late as its copy can still be hidden. In a
sequence-to-sequence model with additive attention, the sum of all keys and one query is never kept: the gradient of
each decoder step computes it again, so memory grows with the length of the source instead of its square.

Departures. There is no static graph to rewrite: the threshold is what the budget leaves, the one whose step is
fastest when simulated within the budget, and the simulator places the triggers. PyTorch saves the ``tanh`` of such a
sum, not the sum; so that is recomputed. It is recognised as a sum in which one operand is spread over another that
several such sums share (the keys). PyTorch does not save the keys unless some op needs them, in which case their
projection is replayed too. The attention rule applies without a budget as well. On a host of limited size what there
is no room for stays.
"""

from __future__ import annotations

from collections import Counter

from lightning_offload.graph.memory_plan import Action, MemoryPlan
from lightning_offload.planning.policies.fitting import Fitting, Ordered, fit_host
from lightning_offload.planning.policies.kinds import Kind, kind_of
from lightning_offload.planning.policies.layers import Layers, layers_of
from lightning_offload.planning.problem import Problem
from lightning_offload.planning.request import PlanRequest


def swap_out_in(request: PlanRequest) -> MemoryPlan:
    """Swap the maps that live longest, as many as the budget asks for; recompute attention sums."""
    layers = layers_of(request.problem)
    sums: dict[int, Action] = dict.fromkeys(attention_sums(layers), "recompute")
    maps = fit_host(request, (s for s in layers.swappable() if s not in sums), sums)
    order: Ordered = [(s, "swap") for s in maps]
    return Fitting(request, "swap-out-in").prefixes(order, sums).plan()


def attention_sums(layers: Layers) -> list[int]:
    """Storages that hold a sum of keys and one query, or an activation function of it."""
    problem = layers.problem
    keys = {i: spread for i, op in enumerate(problem.graph.ops) if (spread := _spread_over(problem, i)) is not None}
    num_sums = Counter(keys.values())
    found: list[int] = []
    for s, layer in layers.by_storage.items():
        i = layer.producer
        if layer.can_recompute and i >= 0 and kind_of(problem.graph.ops[i].name) is Kind.ACTIVATION:
            i = problem.graph.values[problem.graph.ops[i].inputs[0]].producer
        if layer.can_recompute and num_sums[keys.get(i, -1)] > 1:
            found.append(s)
    return found


def _spread_over(problem: Problem, index: int) -> int | None:
    """The larger operand of a forward sum in which a smaller one of the step is spread over it, None for others."""
    graph, op = problem.graph, problem.graph.ops[index]
    if op.phase != "forward" or kind_of(op.name) is not Kind.JOIN or len(op.inputs) != 2 or len(op.outputs) != 1:
        return None
    storages = [graph.storages[graph.values[v].storage] for v in (*op.inputs, *op.outputs)]
    if storages[0].is_persistent or storages[1].is_persistent:
        return None
    small, large = sorted((0, 1), key=lambda i: storages[i].num_bytes)
    is_spread = 0 < 2 * storages[small].num_bytes <= storages[large].num_bytes == storages[2].num_bytes
    return op.inputs[large] if is_spread else None
