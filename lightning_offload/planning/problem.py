"""A step graph as a planner sees it: the storages there is a choice about, what replays of them cost, and flat columns.

A saved storage is a *candidate* if it may leave the device: made in the step, saved in one value that is the last one
written to it, and large enough to be worth it. Others are kept, and counted as fixed.

A candidate's *replay* makes it again if every saved value around it is at hand. Where what it reads is recomputed as
well, replays form a *chain*; `anchors` are the storages that break chains at a length.

The simulator's inner loops read the problem as columns of plain numbers (:mod:`~.arrays`).
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lightning_offload.graph.host_layout import LiveRanges, stored_bytes
from lightning_offload.graph.memory_plan import Action
from lightning_offload.graph.step_graph import Save, StepGraph, last_values
from lightning_offload.planning.arrays import KEEP, RECOMPUTE, SWAP, Codes, StepArrays, as_lists

MIN_BYTES = 64 << 10
"""Smaller saved storages are always kept, unless the whole step is small: cf. :func:`min_bytes`."""

Bytes = npt.NDArray[np.int64]

_CODES: dict[Action, int] = {"keep": KEEP, "swap": SWAP, "recompute": RECOMPUTE}
_ACTIONS: tuple[Action, ...] = ("keep", "swap", "recompute")


class Candidate(NamedTuple):
    """A saved storage that may be swapped or recomputed.

    Attributes:
        storage: Index in the graph.
        value: The value that is saved.
        num_bytes: Size.
        death: First tick without references of the program itself.
        pack_tick: First pack.
        release: First tick at which autograd has dropped all saved tensors on it.
        can_swap: Whether swapping makes sense: not for a cast of a parameter, which is cast again instead.
        can_recompute: Whether its producer, and what that needs, can be replayed.
        module: Who saved it.
    """

    storage: int
    value: int
    num_bytes: int
    death: int
    pack_tick: int
    release: int
    can_swap: bool
    can_recompute: bool
    module: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Unpack:
    """One unpack of a saved tensor; its ordinal is its place in :attr:`Problem.unpacks`."""

    tick: int
    storage: int
    value: int


class Problem:
    """A step graph with the choices that there are: which storages may leave the device, and what that takes.

    Args:
        graph: The step.
        keep: Storages that must stay on the device.
        smallest: Bytes below which there is no choice; by default :func:`min_bytes`.

    Attributes:
        graph: The step, with storages as large as what the device's allocator hands out for them.
        requested: The step, with storages as large as what was asked for.
        candidates: By storage.
        unpacks: All unpacks of the step, in order.
        unpack_ticks: Their ticks.
        op_ticks: Tick of each op.
        base: Live bytes at each tick that no plan changes.
        seconds: Duration of the op at each tick, 0 where there is none.
        stays: How long swapped storages lie on their tier.
        views: What others have made of it, by type, so that it is made once.
        is_urgent: Whether a step waits for its plan, so that simulating it must not wait for a compiler.
    """

    def __init__(self, graph: StepGraph, keep: frozenset[int] = frozenset(), smallest: int | None = None) -> None:
        self.requested = graph
        self.graph = graph = graph.allocated()
        self.stays = LiveRanges(graph)
        self.views: dict[type, object] = {}
        self.is_urgent = False
        self._walks: dict[int, Walk | None] = {}
        self._replay_seconds: dict[int, float] = {}
        self.last_value = last_values(graph)
        self.written_until = _overwritten_at(graph)
        saves = _saves_by_storage(graph)
        self.saved_value = {s: {save.value for save in group} for s, group in saves.items()}
        self.release = self.stays.dropped
        limit = min_bytes(graph) if smallest is None else smallest
        self.candidates: dict[int, Candidate] = {}
        for storage, group in saves.items():
            if storage not in keep and graph.storages[storage].num_bytes >= limit and self._may_leave(storage, group):
                self.candidates[storage] = self._candidate(storage, group)
        self.unpacks = _unpacks(graph)
        self.unpack_ticks = np.array([unpack.tick for unpack in self.unpacks], dtype=np.int64)
        self.op_ticks = np.array([op.tick for op in graph.ops], dtype=np.int64)
        self._stands = self._when_storages_stand(saves)
        sizes = np.array([s.num_bytes for s in graph.storages], dtype=np.int64)
        self.base = self._base(sizes, np.array([op.workspace_bytes for op in graph.ops], dtype=np.int64))
        self.seconds = self._by_tick(np.array([op.seconds for op in graph.ops], dtype=np.float64))

    def resized(self, graph: StepGraph, workspace_bytes: Bytes, op_seconds: npt.NDArray[np.float64]) -> Problem:
        """The problem of a step of the same structure and other figures, in a fraction of the time.

        Args:
            graph: The step, with its own storages; its ops' figures are not read.
            workspace_bytes: By op.
            op_seconds: By op.

        Returns:
            One with the same candidates, however small they are.
        """
        made = copy.copy(self)
        made.requested = graph
        made.graph = graph = graph.allocated()
        made.views, made._replay_seconds = {}, {}
        for name in ("lists", "plain_seconds", "_op_seconds"):
            made.__dict__.pop(name, None)
        sizes = np.array([s.num_bytes for s in graph.storages], dtype=np.int64)
        made.candidates = {s: c._replace(num_bytes=max(1, int(sizes[s]))) for s, c in self.candidates.items()}
        made.base = made._base(sizes, workspace_bytes)
        made.seconds = made._by_tick(op_seconds)
        made.op_seconds = op_seconds
        storage = self.arrays.storage
        saved_bytes = sizes[self.saved_storages]
        made.__dict__["arrays"] = self.arrays._replace(
            seconds=made.seconds,
            base=made.base,
            size=saved_bytes,
            stored_size=stored_bytes(saved_bytes),
            made_bytes=np.where(self._is_persistent[storage], 0, sizes[storage]),
            op_seconds=op_seconds,
            op_workspace=workspace_bytes,
        )
        return made

    @functools.cached_property
    def op_seconds(self) -> npt.NDArray[np.float64]:
        """Duration of each op."""
        return self.seconds[self.op_ticks]

    @functools.cached_property
    def _is_persistent(self) -> npt.NDArray[np.bool_]:
        return np.array([s.is_persistent for s in self.graph.storages], dtype=np.bool_)

    def _by_tick(self, op_seconds: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        seconds = np.zeros(self.graph.num_ticks + 1)
        seconds[self.op_ticks] = op_seconds
        return seconds

    @functools.cached_property
    def order(self) -> npt.NDArray[np.int64]:
        """The candidates' storages: candidate number i, in all arrays, is storage ``order[i]``."""
        return np.fromiter(self.candidates, dtype=np.int64)

    @functools.cached_property
    def number(self) -> dict[int, int]:
        """By storage: the candidate's number."""
        return {s: i for i, s in enumerate(self.candidates)}

    @functools.cached_property
    def arrays(self) -> StepArrays:
        """The step as flat columns."""
        return step_arrays(self)

    @functools.cached_property
    def lists(self) -> StepArrays:
        """The same columns as lists."""
        return as_lists(self.arrays)

    def columns(self, is_compiled: bool) -> StepArrays:
        """The columns in the form that the loops want."""
        return self.arrays if is_compiled else self.lists

    @functools.cached_property
    def plain_seconds(self) -> float:
        """Duration of the step's own ops."""
        return float(self.seconds.sum())

    @functools.cached_property
    def num_rows(self) -> int:
        """Rows that a simulation goes through, roughly: ticks, ops, candidates."""
        return 4 * self.graph.num_ticks + 8 * len(self.arrays.replayed) + 8 * len(self.candidates)

    def codes(self, actions: Mapping[int, Action]) -> Codes:
        """Actions as an array: one code (KEEP, SWAP, RECOMPUTE of :mod:`~.arrays`) for each candidate.

        Raises:
            KeyError: There is no choice about one of the storages.
        """
        codes = np.zeros(len(self.candidates), dtype=np.int8)
        if actions:
            codes[[self.number[s] for s in actions]] = [_CODES[action] for action in actions.values()]
        return codes

    def actions(self, codes: Codes) -> dict[int, Action]:
        """The actions that an array stands for, by storage; what is kept is left out."""
        return {int(self.order[i]): _ACTIONS[codes[i]] for i in np.flatnonzero(codes)}

    def flags(self, storages: Iterable[int]) -> npt.NDArray[np.bool_]:
        """Which of the candidates are among some storages; others among those are ignored."""
        flags = np.zeros(len(self.candidates), dtype=np.bool_)
        flags[[self.number[s] for s in storages if s in self.number]] = True
        return flags

    def replay(self, candidate: Candidate) -> Walk | None:
        """What a replay of a candidate runs and reads, the same at all sizes; None where there can be none."""
        storage = candidate.storage
        if storage not in self._walks:
            walk = walk_back(self, candidate.value, MAX_REPLAYED_OPS) if candidate.can_recompute else None
            self._walks[storage] = walk if walk is not None and len(walk[0]) <= MAX_REPLAYED_OPS else None
        return self._walks[storage]

    def replay_seconds(self, storage: int, ops: Sequence[int]) -> float:
        """Duration of the ops of a storage's replay."""
        if storage not in self._replay_seconds:
            seconds = self._op_seconds
            self._replay_seconds[storage] = sum([seconds[i] for i in ops])
        return self._replay_seconds[storage]

    @functools.cached_property
    def _op_seconds(self) -> list[float]:
        """The same as `op_seconds`: a list's items come sooner than an array's."""
        found: list[float] = self.op_seconds.tolist()
        return found

    @functools.cached_property
    def saved_storages(self) -> list[int]:
        """The storages that have numbers, by number."""
        others = (s for s, v in self.last_value.items() if self.is_saved_for_good(v) and not self.is_external(v))
        return [*self.candidates, *(s for s in others if s not in self.candidates)]

    def _may_leave(self, storage: int, group: list[Save]) -> bool:
        if self.graph.storages[storage].is_persistent or any(save.must_keep for save in group):
            return False
        return self.saved_value[storage] == {self.last_value[storage]}

    def _candidate(self, storage: int, group: list[Save]) -> Candidate:
        value = group[0].value
        return Candidate(
            storage=storage,
            value=value,
            num_bytes=self.graph.storages[storage].num_bytes,
            death=self.graph.storages[storage].death,
            pack_tick=self.stays.begin[storage],
            release=self.release[storage],
            can_swap=not self._is_cast_of_parameter(value),
            can_recompute=self.can_replay(value),
            module=group[0].module,
        )

    def _is_cast_of_parameter(self, value: int) -> bool:
        producer = self.graph.values[value].producer
        if producer < 0 or not self.graph.ops[producer].name.startswith("aten._to_copy"):
            return False
        return all(self.is_external(v) for v in self.graph.ops[producer].inputs)

    def is_external(self, value: int) -> bool:
        """Whether a value existed before the step and still does after it."""
        storage = self.graph.values[value].storage
        return self.graph.storages[storage].is_persistent and self.last_value[storage] == value

    def is_saved_for_good(self, value: int) -> bool:
        """Whether a value is saved and nothing overwrites its storage afterwards, so that a replay may read it."""
        storage = self.graph.values[value].storage
        return value in self.saved_value.get(storage, ()) and self.last_value[storage] == value

    def can_replay(self, value: int) -> bool:
        """Whether a value can be made again from given, saved or replayable values."""
        return self._replayable[value]

    @functools.cached_property
    def _replayable(self) -> list[bool]:
        """By value; ops are in order, so one pass suffices."""
        values, ops = self.graph.values, self.graph.ops
        replayable = [False] * len(values)
        for op in ops:
            ok = op.replayable and all(self._can_have(v, replayable) for v in op.inputs)
            for v in op.outputs:
                replayable[v] = ok and v not in op.unreplayed
        return replayable

    def _can_have(self, value: int, replayable: list[bool]) -> bool:
        return replayable[value] or self.is_saved_for_good(value) or self.is_external(value)

    def _when_storages_stand(self, saves: dict[int, list[Save]]) -> tuple[Bytes, Bytes]:
        """By storage: the first and the last tick plus one at which no plan changes that it is there."""
        graph = self.graph
        begin, end = np.zeros((2, len(graph.storages)), dtype=np.int64)
        for i, storage in enumerate(graph.storages):
            until = storage.death if not storage.is_persistent else graph.num_ticks + 1
            if i in saves and i not in self.candidates:
                until = max(until, self.release[i])
            begin[i], end[i] = max(storage.birth, 0), until
        return begin, end

    def _base(self, sizes: Bytes, workspace_bytes: Bytes) -> Bytes:
        """Bytes of storages while the program holds them, of saved ones that are always kept, and of workspaces."""
        graph = self.graph
        begin, end = self._stands
        delta = np.zeros(graph.num_ticks + 2, dtype=np.int64)
        delta[0] += graph.extra_bytes + graph.old_gradient_bytes
        np.add.at(delta, begin, sizes)
        np.subtract.at(delta, end, sizes)
        for departure in graph.departures:
            delta[departure.tick] -= departure.num_bytes
        if self.unpacks:
            freed = graph.old_gradient_bytes - graph.accumulated_bytes
            delta[self.unpacks[0].tick] += graph.gradient_bytes - freed
            if graph.accumulations:
                made = sizes[[gradient.storage for gradient in graph.made_gradients]]
                to_come = np.cumsum(made[::-1])[::-1] - made
                there = [found.idle_bytes + np.minimum(found.added_to_bytes, to_come) for found in graph.accumulations]
                most = np.max(there, axis=0)
                ticks = [gradient.tick for gradient in graph.made_gradients]
                np.add.at(delta, ticks, np.diff(most, prepend=graph.accumulated_bytes))
        base: Bytes = np.cumsum(delta)[: graph.num_ticks + 1]
        base[self.op_ticks] += workspace_bytes
        return base


def min_bytes(graph: StepGraph) -> int:
    """Smallest size worth a decision: 64 KiB, less in a step so small that this would be most of it."""
    saved = {graph.values[save.value].storage for save in graph.saves}
    total = sum(graph.storages[s].num_bytes for s in saved if not graph.storages[s].is_persistent)
    return max(1, min(MIN_BYTES, total // 2048))


def _overwritten_at(graph: StepGraph) -> list[int]:
    """By value: the tick at which the next value is written on its storage; beyond the step if none is."""
    until = [graph.num_ticks + 1] * len(graph.values)
    latest: dict[int, int] = {}
    for i, value in enumerate(graph.values):
        if value.storage in latest:
            until[latest[value.storage]] = graph.ops[value.producer].tick if value.producer >= 0 else 0
        latest[value.storage] = i
    return until


def _saves_by_storage(graph: StepGraph) -> dict[int, list[Save]]:
    groups: dict[int, list[Save]] = {}
    for save in graph.saves:
        groups.setdefault(graph.values[save.value].storage, []).append(save)
    return groups


def _unpacks(graph: StepGraph) -> list[Unpack]:
    return sorted(
        (
            Unpack(tick=tick, storage=graph.values[save.value].storage, value=save.value)
            for save in graph.saves
            for tick in save.unpack_ticks
        ),
        key=lambda unpack: unpack.tick,
    )


MAX_REPLAYED_OPS = 256
"""Replays of more ops in a row that save nothing are no choice; the limit keeps long chains of them affordable."""


Walk = tuple[tuple[int, ...], tuple[int, ...]]
"""Ops that make a value from saved values and from those that are always there, and the saved ones that they read."""


def walk_back(
    problem: Problem, value: int, most: int | None = None, is_held: Callable[[int], bool] = lambda value: False
) -> Walk:
    """Walk back from a value to the saved values around it.

    Args:
        problem: The step.
        value: What is to be made again.
        most: Of how many ops it is too far: the walk ends at the one after them.
        is_held: Which values that are not saved are at hand, so that they count for neither ops nor saved values.
    """
    values, ops = problem.graph.values, problem.graph.ops
    found, saved = dict[int, None](), dict[int, None]()
    stack = [value]
    while stack and (most is None or len(found) <= most):
        producer = values[stack.pop()].producer
        if producer in found or producer < 0:
            continue
        found[producer] = None
        for v in ops[producer].inputs:
            if problem.is_external(v):
                continue
            if problem.is_saved_for_good(v):
                saved[v] = None
            elif not is_held(v):
                stack.append(v)
    return tuple(found), tuple(saved)


def replay_cost(problem: Problem, candidate: Candidate, chain_bytes: Mapping[int, float]) -> tuple[float, float]:
    """Seconds to replay a storage from the saved tensors around it, and the bytes of the chain behind it.

    Args:
        problem: The step.
        candidate: The storage.
        chain_bytes: By saved value: the bytes of the chain that its own replay would need; 0 if it is at hand.

    Returns:
        Infinite for both where it cannot be replayed, or only by very many ops in a row that save nothing.
    """
    replay = problem.replay(candidate)
    if replay is None:
        return float("inf"), float("inf")
    ops, saved = replay
    chain = candidate.num_bytes + sum([chain_bytes.get(v, 0.0) for v in saved])
    return problem.replay_seconds(candidate.storage, ops), chain


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


def step_arrays(problem: Problem) -> StepArrays:
    """Lay a problem out as columns."""
    graph, candidates = problem.graph, list(problem.candidates.values())
    saved = problem.saved_storages
    number = {storage: i for i, storage in enumerate(saved)}
    op_at = np.zeros(graph.num_ticks + 3, dtype=bool)
    op_at[problem.op_ticks] = True
    external = [problem.is_external(v) for v in range(len(graph.values))]
    inputs = [[v for v in dict.fromkeys(op.inputs) if not external[v]] for op in graph.ops]
    outputs = [list(dict.fromkeys(op.outputs)) for op in graph.ops]
    in_begin, flat_inputs = _ragged(inputs)
    out_begin, flat_outputs = _ragged(outputs)
    values, storages = graph.values, graph.storages
    saved_value = [problem.last_value[s] for s in saved]
    number_of = np.full(len(values), -1, dtype=np.int64)
    number_of[saved_value] = np.arange(len(saved))
    wanted = [unpack for unpack in problem.unpacks if unpack.storage in problem.candidates]
    death = _column(storages[v.storage].death for v in values)
    packs = [problem.stays.begin[s] for s in saved]
    by_pack = np.argsort(_column(packs[: len(candidates)]), kind="stable")
    return StepArrays(
        seconds=problem.seconds,
        base=problem.base,
        next_op=_next_ticks(op_at, graph.num_ticks),
        last_op=_last_ticks(op_at),
        unpack_tick=problem.unpack_ticks,
        wanted=_column(number[unpack.storage] for unpack in wanted),
        wanted_tick=_column(unpack.tick for unpack in wanted),
        num_candidates=_column([len(candidates)]),
        size=(size := _column(storages[s].num_bytes for s in saved)),
        stored_size=stored_bytes(size),
        storage_of=_column(saved),
        value=_column(saved_value),
        death=_column(storages[s].death for s in saved),
        pack=_column(packs),
        release=_column(problem.release[s] for s in saved),
        by_pack=by_pack,
        rank=np.argsort(by_pack),
        by_death=np.argsort(_column(c.death for c in candidates), kind="stable"),
        live_until=np.minimum(death, _column(problem.written_until)),
        saved=number_of,
        storage=_column(v.storage for v in values),
        producer=_column(v.producer for v in values),
        made_bytes=_column(0 if storages[v.storage].is_persistent else storages[v.storage].num_bytes for v in values),
        op_seconds=problem.op_seconds,
        op_workspace=_column(op.workspace_bytes for op in graph.ops),
        in_begin=in_begin,
        inputs=flat_inputs,
        out_begin=out_begin,
        outputs=flat_outputs,
        replayed=_column(_replayed_ops(problem, inputs)),
    )


def _replayed_ops(problem: Problem, inputs: Sequence[Sequence[int]]) -> list[int]:
    values = problem.graph.values
    found = {values[c.value].producer for c in problem.candidates.values() if c.can_recompute}
    stack = list(found)
    while stack:
        for v in inputs[stack.pop()]:
            producer = values[v].producer
            if producer >= 0 and producer not in found and not problem.is_saved_for_good(v):
                found.add(producer)
                stack.append(producer)
    return sorted(found, reverse=True)


def _next_ticks(op_at: npt.NDArray[np.bool_], end: int) -> npt.NDArray[np.int64]:
    ticks = np.where(op_at, np.arange(len(op_at)), end)
    return np.minimum.accumulate(ticks[::-1])[::-1].copy()


def _last_ticks(op_at: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    return np.maximum.accumulate(np.where(op_at, np.arange(len(op_at)), -1))


def _column(numbers: Iterable[int]) -> npt.NDArray[np.int64]:
    return np.fromiter(numbers, dtype=np.int64)


def _ragged(lists: Sequence[Sequence[int]]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    begin = np.zeros(len(lists) + 1, dtype=np.int64)
    np.cumsum([len(items) for items in lists], out=begin[1:])
    return begin, _column(v for items in lists for v in items)
