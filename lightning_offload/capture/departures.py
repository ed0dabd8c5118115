"""What was there before a step, and is dropped in the midst of it: the outputs of the step before, above all.

A program that holds what a step gave until the next one gives another has both for a while, ``out = model(x)``. Such
memory is the step's only until then. Seen through weak references, op by op; what an op of the step has to do with is
in its graph, and does not count.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from typing_extensions import override

from lightning_offload.graph.step_graph import Departure, StepGraph
from lightning_offload.tensors.observer import StepObserver
from lightning_offload.tensors.op_facts import Effects, OpFacts, effects


class Dropped(NamedTuple):
    """A storage that was dropped.

    Attributes:
        key: Its identity, while it lived.
        num_bytes: Its size.
        num_ops: How many ops of the step had run.
        in_forward: Whether backward had not begun.
    """

    key: int
    num_bytes: int
    num_ops: int
    in_forward: bool


class Departures(StepObserver):
    """Watches storages that were there before a step.

    Args:
        there: These.

    Attributes:
        num_ops: Ops of the step so far.
        dropped: Those that died before its last op, and that no op had to do with.
    """

    def __init__(self, there: Iterable[torch.UntypedStorage]) -> None:
        self.num_ops = 0
        self.dropped: list[Dropped] = []
        self._dead: deque[_Watched] = deque()
        self._watched = {storage._cdata: _watched(storage, self._dead.append) for storage in there}

    @override
    def on_op(
        self, facts: OpFacts, args: Any, kwargs: Any, out: Any, seconds: float, did: Effects | None = None
    ) -> None:
        watched = self._watched
        if self._dead:
            in_forward = torch._C._current_graph_task_id() == -1
            while self._dead:
                gone = self._dead.popleft()
                if watched.get(gone.key) is gone:
                    del watched[gone.key]
                    self.dropped.append(Dropped(gone.key, gone.num_bytes, self.num_ops, in_forward))
        self.num_ops += 1
        if watched:
            found_here = did if did is not None else effects(facts, args, kwargs, out)
            for storage in (*found_here.read_from, *found_here.made_on):
                if storage is not None:
                    found = watched.get(storage._cdata)
                    if found is not None and found() is storage:
                        del watched[storage._cdata]

    def on(self, graph: StepGraph) -> tuple[Departure, ...]:
        """What a step drops, by its recorded graph.

        Of a step with other ops than the recorded one, what forward dropped counts as dropped at its end.
        """
        unpacks = [save.unpack_ticks[0] for save in graph.saves if save.unpack_ticks]
        is_same = self.num_ops == len(graph.ops)
        found: dict[int, int] = {}
        for gone in self.dropped:
            if is_same:
                tick = graph.ops[gone.num_ops - 1].tick + 1 if gone.num_ops else 0
            elif gone.in_forward and unpacks:
                tick = min(unpacks)
            else:
                continue
            found[tick] = found.get(tick, 0) + graph.taken_bytes(gone.num_bytes)
        return tuple(Departure(tick=tick, num_bytes=found[tick]) for tick in sorted(found))


class _Watched(weakref.ref[torch.UntypedStorage]):
    __slots__ = ("key", "num_bytes")
    key: int
    num_bytes: int


def _watched(storage: torch.UntypedStorage, died: Callable[[Any], None]) -> _Watched:
    reference = _Watched(storage, died)
    reference.key, reference.num_bytes = storage._cdata, storage.nbytes()
    return reference


def within(departures: tuple[Departure, ...], num_bytes: int) -> tuple[Departure, ...]:
    """What departs of so many bytes, where that is less than was seen to: the larger ones are taken to be gone."""
    excess = sum(departure.num_bytes for departure in departures) - num_bytes
    left = {departure.tick: departure.num_bytes for departure in departures}
    for tick in sorted(left, key=lambda tick: -left[tick]):
        if excess <= 0:
            break
        taken = min(excess, left[tick])
        left[tick] -= taken
        excess -= taken
    return tuple(Departure(tick=tick, num_bytes=n) for tick, n in left.items() if n)
