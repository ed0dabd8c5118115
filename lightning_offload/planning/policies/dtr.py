"""DTR: evict whatever is cheapest, stalest and largest at the moment when memory runs out.

Kirisame, Lyubomirsky, Haan, Brennan, He, Roesch, Chen, Tatlock, "Dynamic Tensor Rematerialization", ICLR 2021, arXiv
2006.09616. Nothing is planned: whenever an op would exceed the budget, the tensor with the lowest
``(own cost + cost of evicted neighbours) / (bytes * time since last access)`` is evicted, and made again when it is
read. Costs of neighbours, up and down the graph, are those of connected evicted tensors, kept by union-find as in the
paper's ``h_DTR^eq``.

Departures. The run is made ahead of the step, on its recorded times, with everything that DTR could have measured; so
the heuristic costs no time of the step. Tensors are saved storages. What is evicted again after it was made again is
made anew for each reader (not memoised). Only what the program has let go of is evicted. The paper's run keeps to the
budget itself; replays of chains take more than it counts, so it is run for many budgets, whatever the given one, and
the fastest step that fits counts. Nothing is swapped.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lightning_offload.graph.memory_plan import Action, MemoryPlan
from lightning_offload.planning.policies.checkmate import largest_first
from lightning_offload.planning.policies.fitting import Fitting, Tried, num_tried
from lightning_offload.planning.policies.layers import Layers, layers_of
from lightning_offload.planning.request import PlanRequest

_MAX_BUDGETS = 96  # that are tried
_SOON = 1e-9  # seconds: the least time since an access that counts


def dtr(request: PlanRequest) -> MemoryPlan:
    """Evict at the moment when memory runs out, the cheapest by DTR's heuristic first."""
    fitting = Fitting(request, "dtr").one(Tried(actions={}))
    if request.budget_bytes is not None and request.plain.peak_bytes > request.budget_bytes:
        low, high = request.floor.peak_bytes, request.plain.peak_bytes
        num = max(1, min(_MAX_BUDGETS, num_tried(request) // 2))
        fitting.scan(num, lambda i: run(request, layers_of(request.problem), high - (high - low) * i // num))
        fitting.resort_to(largest_first(request.problem))
    return fitting.plan()


def run(request: PlanRequest, layers: Layers, limit_bytes: int) -> Tried:
    """What DTR evicts in a step whose memory is limited.

    Args:
        request: The step.
        layers: Its layers.
        limit_bytes: The most live bytes.
    """
    return _Run(request, layers, limit_bytes).done()


class _Run:
    """A step under DTR, tick by tick."""

    def __init__(self, request: PlanRequest, layers: Layers, limit_bytes: int) -> None:
        problem = request.problem
        candidates = list(problem.candidates.values())
        self._layers = layers
        self._request = request
        self._limit = limit_bytes
        self._storages = [c.storage for c in candidates]
        self._number = {s: i for i, s in enumerate(self._storages)}
        self._size = np.array([c.num_bytes for c in candidates], dtype=np.float64)
        self._death = np.array([c.death for c in candidates], dtype=np.int64)
        self._release = np.array([c.release for c in candidates], dtype=np.int64)
        self._can = np.array([layers.by_storage[s].can_recompute for s in self._storages])
        self._cost = np.array([layers.by_storage[s].seconds for s in self._storages])
        self._accessed = layers.starts[[layers.by_storage[s].last_used for s in self._storages]].copy()
        self._is_away = np.zeros(len(candidates), dtype=np.bool_)
        self._is_chosen = np.zeros(len(candidates), dtype=np.bool_)
        self._is_again = np.zeros(len(candidates), dtype=np.bool_)
        self._around = self._neighbours()
        self._group = list(range(len(candidates)))  # union-find over evicted storages
        self._group_cost = self._cost.copy()

    def _neighbours(self) -> list[list[int]]:
        around: list[list[int]] = [[] for _ in self._storages]
        for i, s in enumerate(self._storages):
            for source in self._layers.by_storage[s].sources:
                if source in self._number:
                    around[i].append(self._number[source])
                    around[self._number[source]].append(i)
        return around

    def done(self) -> Tried:
        """The choice that the run comes to."""
        plain, reads = self._request.plain.memory, self._reads()
        first_backward = (
            int(self._request.problem.unpack_ticks[0]) if len(self._request.problem.unpacks) else len(plain)
        )
        over = np.flatnonzero(plain > self._limit)
        for tick in sorted({*over.tolist(), *(t for t in reads if t >= first_backward)}):
            for i in reads.get(tick, ()):
                self._access(i, tick)
            if plain[tick] > self._limit:
                self._make_room(tick, float(plain[tick]))
        actions: dict[int, Action] = {self._storages[i]: "recompute" for i in np.flatnonzero(self._is_chosen).tolist()}
        anew = np.flatnonzero(self._is_again & self._is_chosen).tolist()
        return Tried(actions=actions, no_memo=frozenset(self._storages[i] for i in anew))

    def _reads(self) -> dict[int, list[int]]:
        reads: dict[int, list[int]] = {}
        for unpack in self._request.problem.unpacks:
            if unpack.storage in self._number:
                reads.setdefault(unpack.tick, []).append(self._number[unpack.storage])
        return reads

    def _access(self, i: int, tick: int) -> None:
        """Read a storage, and make it again with all that is evicted behind it."""
        stack = [i]
        while stack:
            k = stack.pop()
            self._accessed[k] = self._layers.starts[tick]
            if self._is_away[k]:
                self._is_away[k] = False
                self._group_cost[self._find(k)] -= self._cost[k]
                self._group[k] = k if self._find(k) != k else self._group[k]
                stack += [
                    self._number[s] for s in self._layers.by_storage[self._storages[k]].sources if s in self._number
                ]

    def _make_room(self, tick: int, plain_bytes: float) -> None:
        lives = (self._death <= tick) & (tick < self._release)
        excess = plain_bytes - float(self._size[self._is_away & lives].sum()) - self._limit
        now = float(self._layers.starts[tick])
        while excess > 0:
            allowed = np.flatnonzero(lives & ~self._is_away & self._can)
            if not len(allowed):
                return
            stale = np.maximum(now - self._accessed[allowed], _SOON)
            score = (self._cost[allowed] + self._around_cost(allowed)) / (self._size[allowed] * stale)
            i = int(allowed[int(np.argmin(score))])
            self._is_again[i] |= self._is_chosen[i]
            self._is_chosen[i] = self._is_away[i] = True
            self._join(i)
            excess -= float(self._size[i])

    def _around_cost(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        costs = np.zeros(len(numbers))
        for place, i in enumerate(numbers.tolist()):
            groups = {self._find(k) for k in self._around[i] if self._is_away[k]}
            costs[place] = sum(max(0.0, float(self._group_cost[g])) for g in groups)
        return costs

    def _find(self, i: int) -> int:
        while self._group[i] != i:
            self._group[i] = self._group[self._group[i]]
            i = self._group[i]
        return i

    def _join(self, i: int) -> None:
        self._group[i], self._group_cost[i] = i, self._cost[i]
        for k in self._around[i]:
            if self._is_away[k] and (other := self._find(k)) != (mine := self._find(i)):
                self._group[mine] = other
                self._group_cost[other] += self._group_cost[mine]
