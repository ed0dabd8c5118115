"""How long a swapped storage's copy lies on its tier.

From its first pack until autograd has dropped it: not only until it was read back, since it may be read again. A
replay holds what it reads, so where a recomputed storage reads it, directly or through others that are recomputed,
the stay lasts until that one is dropped. Stays depend on which storages are recomputed, and on nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lightning_offload.graph.step_graph import StepGraph

ALIGNMENT = 4096
"""Bytes; direct access to a disk needs it, and memory comes in such pages."""


def stored_bytes(num_bytes: int) -> int:
    """What a storage of this size takes on a tier."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


class Stays:
    """Stays of all saved storages of a graph.

    Attributes:
        begin: By storage: tick of its first pack.
        dropped: By storage: first tick at which autograd has dropped it.
    """

    def __init__(self, graph: StepGraph) -> None:
        self.begin: dict[int, int] = {}
        self.dropped: dict[int, int] = {}
        self._graph = graph
        self._last = {value.storage: i for i, value in enumerate(graph.values)}
        self._saved: set[int] = set()
        self._behind: dict[int, Sequence[int]] = {}
        for save in graph.saves:
            storage = graph.values[save.value].storage
            self.begin[storage] = min(save.pack_tick, self.begin.get(storage, save.pack_tick))
            self.dropped[storage] = max(save.release_tick, self.dropped.get(storage, -1))
            if self._last[storage] == save.value:
                self._saved.add(save.value)

    def ends(self, recomputed: Iterable[int]) -> dict[int, int]:
        """By saved storage: first tick at which nobody may read it any more.

        Args:
            recomputed: Storages that are recomputed.
        """
        values = self._graph.values
        ends = self.dropped.copy()
        until = {v: 0 for s in recomputed if (v := self._last.get(s)) in self._saved}  # by value that replays make
        last = max((values[v].producer for v in until), default=-1)
        # A value reads what was made before it, so whoever reads it comes first.
        for i in range(last, -1, -1):
            made = [v for v in self._graph.ops[i].outputs if v in until]
            end = max((ends[values[v].storage] if v in self._saved else until[v] for v in made), default=0)
            for v in self._graph.ops[i].inputs if end else ():
                storage = values[v].storage
                if self._is_given(v):
                    continue
                if v in self._saved:
                    ends[storage] = max(ends[storage], end)
                else:
                    until[v] = max(until.get(v, 0), end)
        return ends

    def _is_given(self, value: int) -> bool:
        storage = self._graph.values[value].storage
        return self._graph.storages[storage].is_persistent and self._last[storage] == value

    def behind(self, value: int) -> Sequence[int]:
        """Saved storages that a replay of a value reads, through values that are not saved."""
        found = self._behind.get(value)
        if found is None:
            found = self._behind[value] = self._find_behind(value)
        return found

    def _find_behind(self, value: int) -> Sequence[int]:
        values, ops = self._graph.values, self._graph.ops
        found: dict[int, None] = {}
        stack, seen = [value], {value}
        while stack:
            producer = values[stack.pop()].producer
            for v in ops[producer].inputs if producer >= 0 else ():
                if v in seen or self._is_given(v):
                    continue
                seen.add(v)
                if v in self._saved:
                    found[values[v].storage] = None
                else:
                    stack.append(v)
        return tuple(found)
