"""What one replay reads and costs, if every saved value around it is at hand."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_offload.planning.problem import Candidate, Problem

MAX_OPS = 256
"""Replays of more ops in a row that save nothing are no choice; the limit keeps long chains of them affordable."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where a value comes from.

    Attributes:
        seconds: Time of the ops that make it from saved values and from those that are always there.
        saved: The saved values that they read.
    """

    seconds: float
    saved: tuple[int, ...]


def find_source(problem: Problem, candidate: Candidate) -> Source | None:
    """Walk back from a candidate to the saved values around it; None where that is too far, or impossible."""
    if not candidate.can_recompute:
        return None
    values, ops = problem.graph.values, problem.graph.ops
    seconds, saved = 0.0, dict[int, None]()
    stack, seen = [candidate.value], set[int]()
    while stack:
        producer = values[stack.pop()].producer
        if producer in seen or producer < 0:
            continue
        seen.add(producer)
        if len(seen) > MAX_OPS:
            return None
        seconds += ops[producer].seconds
        for v in ops[producer].inputs:
            if problem.is_saved_for_good(v):
                saved[v] = None
            elif not problem.is_given(v):
                stack.append(v)
    return Source(seconds=seconds, saved=tuple(saved))
