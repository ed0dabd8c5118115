"""When each saved storage must be on the device, and what is replayed for it: the static part of a simulation.

Walks the unpacks in order and does what the runtime would: what is still alive is used, swapped storages are
brought back, recomputed ones are replayed from what is at hand, and values made on the way stay for their own
unpack if they are memoised. A replayed value needs its inputs until it is replayed, so their stay is extended.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping

from lightning_offload.graph.memory_plan import Action
from lightning_offload.planning.problem import Problem, Unpack

Actions = Mapping[int, Action]


@dataclasses.dataclass(slots=True)
class Residency:
    """What backward needs, by storage and by tick.

    Attributes:
        needed_at: First tick at which a swapped or recomputed storage must be on the device.
        held_until: First tick at which nobody needs it any more.
        replay_seconds: Time of the replays at an unpack's tick.
        transient_bytes: Memory of those replays beyond the values that stay.
        num_replayed: Ops replayed.
    """

    needed_at: dict[int, int]
    held_until: dict[int, int]
    replay_seconds: dict[int, float]
    transient_bytes: dict[int, int]
    num_replayed: int = 0


def residency(problem: Problem, actions: Actions, no_memo: frozenset[int] = frozenset()) -> Residency:
    """Walk the step's unpacks under a choice of actions (storages without one are kept)."""
    walk = _Walk(problem, actions, no_memo)
    for unpack in problem.unpacks:
        walk.unpack(unpack)
    walk.hold_inputs()
    return walk.result


class _Walk:
    def __init__(self, problem: Problem, actions: Actions, no_memo: frozenset[int]) -> None:
        self.problem = problem
        self.actions = actions
        self.no_memo = no_memo
        self.result = Residency({}, dict(problem.release), {}, {})

    def unpack(self, unpack: Unpack) -> None:
        if unpack.storage in self.actions:
            calls = self._need(unpack.value, unpack.tick)
            if calls:
                self._replay(calls, unpack)

    def hold_inputs(self) -> None:
        """A recorded call holds what it reads until its result is there again, or is not wanted any more."""
        problem, result = self.problem, self.result
        for s, action in self.actions.items():
            if action == "recompute":
                until = result.needed_at.get(s, problem.release[s])
                for storage in problem.stays.behind(problem.candidates[s].value):
                    other = self.actions.get(storage)
                    if other is None or (other == "swap" and storage in result.needed_at):
                        result.held_until[storage] = max(result.held_until[storage], until)

    def _need(self, value: int, tick: int) -> list[int]:
        """Make a value available at a tick; the ops to replay for it, in order."""
        problem = self.problem
        order: list[int] = []
        seen: set[int] = set()
        stack: list[tuple[int, bool]] = [(value, False)]
        while stack:
            current, expanded = stack.pop()
            producer = problem.graph.values[current].producer
            if expanded:
                order.append(producer)
                continue
            if producer in seen or self._at_hand(current, tick):
                continue
            seen.add(producer)
            stack.append((current, True))
            stack.extend((v, False) for v in reversed(problem.graph.ops[producer].inputs))
        return order

    def _at_hand(self, value: int, tick: int) -> bool:
        problem, result = self.problem, self.result
        if problem.is_live(value, tick) or problem.is_given(value):
            return True
        storage = problem.graph.values[value].storage
        if not problem.is_saved_for_good(value):
            return False
        result.held_until[storage] = max(result.held_until[storage], tick + 1)
        action = self.actions.get(storage)
        if action == "swap":
            result.needed_at.setdefault(storage, tick)
            return True
        return action is None or storage in result.needed_at

    def _replay(self, calls: list[int], unpack: Unpack) -> None:
        """Count the time and memory of a chain of replays, freeing what nobody in it reads any more."""
        graph, result, tick = self.problem.graph, self.result, unpack.tick
        readers = Counter(v for i in calls for v in graph.ops[i].inputs)
        readers[unpack.value] += 1
        own: dict[int, int] = {}
        peak = stays = 0
        for i in calls:
            op = graph.ops[i]
            readers.subtract(op.inputs)
            sizes = {v: self._made_bytes(v) for v in op.outputs}
            written = {graph.values[v].storage for v in op.outputs}
            for v in op.inputs:
                if v in own and graph.values[v].storage in written:
                    del own[v]
            peak = max(peak, stays + sum(own.values()) + sum(sizes.values()) + op.workspace_bytes)
            for v, size in sizes.items():
                if self._stays(v, unpack):
                    result.needed_at[graph.values[v].storage] = tick
                    stays += size
                elif readers[v] > 0:
                    own[v] = size
            for v in op.inputs:
                if readers[v] == 0:
                    own.pop(v, None)
        result.replay_seconds[tick] = sum(graph.ops[i].seconds for i in calls)
        result.transient_bytes[tick] = max(0, peak - stays)
        result.num_replayed += len(calls)

    def _made_bytes(self, value: int) -> int:
        """Device memory for a replayed value; updates of persistent state are left out of replays."""
        storage = self.problem.graph.storages[self.problem.graph.values[value].storage]
        return 0 if storage.is_persistent else storage.num_bytes

    def _stays(self, value: int, unpack: Unpack) -> bool:
        """Whether a replayed value stays on the device: it was asked for, or is memoised for a later unpack."""
        if value == unpack.value:
            return True
        storage = self.problem.graph.values[value].storage
        if self.actions.get(storage) != "recompute" or storage in self.no_memo:
            return False
        saved = value in self.problem.saved_value[storage]
        return saved and self.problem.release[storage] > unpack.tick and storage not in self.result.needed_at
