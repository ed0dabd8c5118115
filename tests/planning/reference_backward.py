"""What backward needs on the device, written for the eye; part of :mod:`tests.planning.reference`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from lightning_offload.graph.memory_plan import Action
from lightning_offload.planning.problem import Problem, Unpack


class Backward:
    """Walks the unpacks as the runtime would.

    Attributes:
        needed: By swapped or recomputed storage: tick of the first unpack that needs it on the device.
        held: By saved storage: first tick at which nobody needs it any more.
        seconds: By tick of an unpack with a replay: the time of its ops.
        transient: Its memory beyond the values that stay.
    """

    def __init__(self, problem: Problem, actions: dict[int, Action], no_memo: frozenset[int]) -> None:
        self.problem, self.actions, self.no_memo = problem, actions, no_memo
        self.needed: dict[int, int] = {}
        self.held = dict(problem.release)
        self.seconds: dict[int, float] = {}
        self.transient: dict[int, int] = {}
        for unpack in problem.unpacks:
            if unpack.storage in actions:
                calls: list[int] = []
                self._visit(unpack.value, unpack.tick, calls, set())
                if calls:
                    self._replay(calls, unpack)
        for s in actions:
            if actions[s] == "recompute":
                self._hold(s)

    def _visit(self, value: int, tick: int, calls: list[int], seen: set[int]) -> None:
        op = self.problem.graph.values[value].producer
        if op in seen or self._at_hand(value, tick) or op < 0:
            return
        seen.add(op)
        for v in self.problem.graph.ops[op].inputs:
            self._visit(v, tick, calls, seen)
        calls.append(op)

    def _at_hand(self, value: int, tick: int) -> bool:
        problem = self.problem
        if is_live(problem, value, tick) or problem.is_external(value):
            return True
        if not problem.is_saved_for_good(value):
            return False
        s = problem.graph.values[value].storage
        self.held[s] = max(self.held[s], tick + 1)
        if self.actions.get(s) == "swap":
            self.needed.setdefault(s, tick)
        return s not in self.actions or s in self.needed

    def _replay(self, calls: list[int], unpack: Unpack) -> None:
        """Run the calls one by one, with the set of values that only this replay holds."""
        graph = self.problem.graph
        own: set[int] = set()
        staying: set[int] = set()
        peak = 0
        for n, i in enumerate(calls):
            op = graph.ops[i]
            wanted_later = Counter(v for later in calls[n + 1 :] for v in graph.ops[later].inputs)
            written = {graph.values[v].storage for v in op.outputs}
            own -= {v for v in op.inputs if graph.values[v].storage in written and not wanted_later[v]}
            peak = max(peak, self._bytes(staying) + self._bytes(own) + self._bytes(op.outputs) + op.workspace_bytes)
            for v in op.outputs:
                if v == unpack.value or self._is_memoised(v, unpack.tick):
                    self.needed[graph.values[v].storage] = unpack.tick
                    staying.add(v)
                else:
                    own.add(v)
            own = {v for v in own if wanted_later[v]}
        self.seconds[unpack.tick] = sum(graph.ops[i].seconds for i in calls)
        self.transient[unpack.tick] = max(0, peak - self._bytes(staying))

    def _is_memoised(self, value: int, tick: int) -> bool:
        s = self.problem.graph.values[value].storage
        is_wanted = self.actions.get(s) == "recompute" and s not in self.no_memo and s not in self.needed
        return is_wanted and self.problem.release[s] > tick and value == self.problem.candidates[s].value

    def _bytes(self, values: Iterable[int]) -> int:
        storages = [self.problem.graph.storages[self.problem.graph.values[v].storage] for v in values]
        return sum(storage.num_bytes for storage in storages if not storage.is_persistent)

    def _hold(self, recomputed: int) -> None:
        """A recorded call holds what it reads until its result is there again, or is not wanted any more."""
        until = self.needed.get(recomputed, self.problem.release[recomputed])
        for s in saved_behind(self.problem, self.problem.candidates[recomputed].value):
            if s not in self.actions or (self.actions[s] == "swap" and s in self.needed):
                self.held[s] = max(self.held[s], until)


def saved_behind(problem: Problem, value: int) -> set[int]:
    """Saved storages that a replay of a value reads, through values that are not saved."""
    graph, found = problem.graph, set[int]()
    pending = [value]
    for v in pending:
        op = graph.values[v].producer
        for read in graph.ops[op].inputs if op >= 0 else ():
            if problem.is_saved_for_good(read) and not problem.is_external(read):
                found.add(graph.values[read].storage)
            elif not problem.is_external(read) and read not in pending:
                pending.append(read)
    return found


def is_live(problem: Problem, value: int, tick: int) -> bool:
    """Whether the program itself still holds a value at a tick."""
    storage = problem.graph.values[value].storage
    return problem.graph.storages[storage].death > tick and problem.written_until[value] > tick
