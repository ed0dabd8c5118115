"""Chains of replays: what recomputing a storage costs given what else is recomputed, and where to break them."""

from __future__ import annotations

from collections.abc import Mapping

from lightning_offload.planning.problem import Candidate, Problem


def replay_cost(problem: Problem, candidate: Candidate, chain_bytes: Mapping[int, float]) -> tuple[float, float]:
    """Seconds to replay a storage from the saved tensors around it, and the bytes of the chain behind it.

    Args:
        problem: The step.
        candidate: The storage.
        chain_bytes: By saved value: the bytes of the chain that its own replay would need; 0 if it is at hand.

    Returns:
        Infinite for both where it cannot be replayed.
    """
    graph = problem.graph
    if not candidate.can_recompute:
        return float("inf"), float("inf")
    seconds, num_bytes = 0.0, float(candidate.num_bytes)
    stack, seen = [candidate.value], set[int]()
    while stack:
        producer = graph.values[stack.pop()].producer
        if producer in seen or producer < 0:
            continue
        seen.add(producer)
        seconds += graph.ops[producer].seconds
        for v in graph.ops[producer].inputs:
            if problem.is_saved_for_good(v):
                num_bytes += chain_bytes.get(v, 0.0)
            elif not problem.is_given(v):
                stack.append(v)
    return seconds, num_bytes


def anchors(problem: Problem, limit_bytes: float) -> set[int]:
    """Storages that must be at hand so that no chain of replays has more than a number of bytes."""
    found: set[int] = set()
    chain_bytes: dict[int, float] = {}
    for c in sorted(problem.candidates.values(), key=lambda c: c.value):
        _, chain = replay_cost(problem, c, chain_bytes)
        if chain > limit_bytes and c.can_swap:
            found.add(c.storage)
            chain = 0.0
        chain_bytes[c.value] = chain
    return found
