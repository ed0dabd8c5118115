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
        Infinite for both where it cannot be replayed, or only by very many ops in a row that save nothing.
    """
    source = problem.source(candidate)
    if source is None:
        return float("inf"), float("inf")
    return source.seconds, candidate.num_bytes + sum([chain_bytes.get(v, 0.0) for v in source.saved])


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
