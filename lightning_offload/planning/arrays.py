"""A problem as flat columns, which is what the simulator's inner loops read.

Ops, values and ticks have the graph's numbers. Saved storages have numbers of their own: the candidates first, in
the problem's order, then those that are always kept but may be read by replays. Lists of lists (what an op reads and
makes) are one column of items and one of where each list begins.

Values that exist before and after the step are always at hand, so they are left out of what ops read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lightning_offload.graph.stays import stored_bytes

if TYPE_CHECKING:
    from lightning_offload.planning.problem import Problem

KEEP, SWAP, RECOMPUTE = 0, 1, 2
"""Codes of the actions."""

Codes = npt.NDArray[np.int8]
"""One action code for each candidate, in the problem's order."""


class StepArrays(NamedTuple):
    """Columns; arrays for the compiled loops, lists for the plain ones.

    Attributes:
        seconds: By tick: duration of the op there.
        base: By tick: bytes that no plan changes.
        next_op: By tick: first tick of an op from there on; the number of ticks where there is none.
        last_op: By tick: last tick of an op up to there; -1 where there is none.
        unpack_tick: By unpack of the step: its tick.
        wanted: By unpack of a candidate: the candidate.
        wanted_tick: Its tick.
        num_candidates: How many of the saved storages are candidates, in a column of one row.
        size: By saved storage: bytes.
        value: The value that is saved.
        death: First tick without references of the program itself.
        pack: First pack.
        release: First tick at which autograd has dropped it.
        dropped: The same, as the tiers count it.
        by_pack: Candidates in the order of their first packs.
        rank: By candidate: its place in that order.
        by_death: Candidates in the order of their deaths.
        live_until: By value: first tick at which the program itself no longer holds it.
        saved: Number of the saved storage whose last contents it is and that may leave or be read; -1 for none.
        storage: Its storage.
        producer: Op that made it; -1 for none.
        made_bytes: Device memory that a replay takes for it; updates of persistent state are left out of replays.
        op_seconds: By op: duration.
        op_workspace: By op: workspace.
        in_begin: By op: where its inputs begin.
        inputs: Values that ops read.
        out_begin: By op: where its outputs begin.
        outputs: Values that ops make.
        replayed: Ops that some choice replays, last first.
    """

    seconds: Any
    base: Any
    next_op: Any
    last_op: Any
    unpack_tick: Any
    wanted: Any
    wanted_tick: Any
    num_candidates: Any
    size: Any
    value: Any
    death: Any
    pack: Any
    release: Any
    dropped: Any
    by_pack: Any
    rank: Any
    by_death: Any
    live_until: Any
    saved: Any
    storage: Any
    producer: Any
    made_bytes: Any
    op_seconds: Any
    op_workspace: Any
    in_begin: Any
    inputs: Any
    out_begin: Any
    outputs: Any
    replayed: Any


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StoredArrays:
    """What a saved storage takes on its tier, and for how long; by number of the saved storage.

    Attributes:
        num_bytes: Rounded up to what it takes there.
        begin: Tick of its first pack.
        dropped: First tick at which autograd has dropped it.
    """

    num_bytes: npt.NDArray[np.int64]
    begin: npt.NDArray[np.int64]
    dropped: npt.NDArray[np.int64]


def step_arrays(problem: Problem) -> StepArrays:
    """Lay a problem out as columns."""
    graph, candidates = problem.graph, list(problem.candidates.values())
    saved = saved_storages(problem)
    number = {storage: i for i, storage in enumerate(saved)}
    op_at = np.zeros(graph.num_ticks + 3, dtype=bool)
    op_at[problem.op_ticks] = True
    given = [problem.is_given(v) for v in range(len(graph.values))]
    inputs = [[v for v in dict.fromkeys(op.inputs) if not given[v]] for op in graph.ops]
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
        size=_column(storages[s].num_bytes for s in saved),
        value=_column(saved_value),
        death=_column(storages[s].death for s in saved),
        pack=_column(packs),
        release=_column(problem.release[s] for s in saved),
        dropped=_column(problem.stays.dropped[s] for s in saved),
        by_pack=by_pack,
        rank=np.argsort(by_pack),
        by_death=np.argsort(_column(c.death for c in candidates), kind="stable"),
        live_until=np.minimum(death, _column(problem.written_until)),
        saved=number_of,
        storage=_column(v.storage for v in values),
        producer=_column(v.producer for v in values),
        made_bytes=_column(0 if storages[v.storage].is_persistent else storages[v.storage].num_bytes for v in values),
        op_seconds=np.array([op.seconds for op in graph.ops], dtype=np.float64),
        op_workspace=_column(op.workspace_bytes for op in graph.ops),
        in_begin=in_begin,
        inputs=flat_inputs,
        out_begin=out_begin,
        outputs=flat_outputs,
        replayed=_column(_replayed_ops(problem, inputs)),
    )


def stored_arrays(problem: Problem) -> StoredArrays:
    """What saved storages take on their tiers."""
    saved = saved_storages(problem)
    return StoredArrays(
        num_bytes=_column(stored_bytes(problem.graph.storages[s].num_bytes) for s in saved),
        begin=_column(problem.stays.begin[s] for s in saved),
        dropped=_column(problem.stays.dropped[s] for s in saved),
    )


def saved_storages(problem: Problem) -> list[int]:
    """The storages that have numbers, by number."""
    others = (s for s, v in problem.last_value.items() if problem.is_saved_for_good(v) and not problem.is_given(v))
    return [*problem.candidates, *(s for s in others if s not in problem.candidates)]


def as_lists(columns: StepArrays) -> StepArrays:
    """The same columns as lists, which plain Python reads several times faster than arrays."""
    return StepArrays(*(column.tolist() for column in columns))


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


class Buffers:
    """Makes columns in the form that the loops want.

    Args:
        is_compiled: Whether that is arrays rather than lists.
    """

    def __init__(self, is_compiled: bool) -> None:
        self._is_compiled = is_compiled

    def whole(self, count: int, fill: int = 0) -> Any:
        """Integers."""
        if not self._is_compiled:
            return [fill] * count
        return np.full(count, fill, dtype=np.int64) if fill else np.zeros(count, dtype=np.int64)

    def real(self, count: int, fill: float = 0.0) -> Any:
        """Floating-point numbers."""
        if not self._is_compiled:
            return [fill] * count
        return np.full(count, fill, dtype=np.float64) if fill else np.zeros(count, dtype=np.float64)

    def copy(self, column: Any) -> Any:
        """A column of either form, to be changed."""
        return column.copy() if self._is_compiled or isinstance(column, list) else column.tolist()
