"""A problem as flat columns, which is what the simulator's inner loops read.

Ops, values and ticks have the graph's numbers. Saved storages have numbers of their own: the candidates first, in
the problem's order, then those that are always kept but may be read by replays. Lists of lists (what an op reads and
makes) are one column of items and one of where each list begins.

Values that exist before and after the step are always at hand, so they are left out of what ops read.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

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
        stored_size: What it takes on a tier.
        storage_of: Its number among the step's storages.
        value: The value that is saved.
        death: First tick without references of the program itself.
        pack: First pack.
        release: First tick at which autograd has dropped it.
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
    stored_size: Any
    storage_of: Any
    value: Any
    death: Any
    pack: Any
    release: Any
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


_Columns = TypeVar("_Columns", bound=tuple[Any, ...])


def as_lists(columns: _Columns) -> _Columns:
    """The same columns as lists, which plain Python reads several times faster than arrays; numbers stay numbers."""
    as_list = (column.tolist() if isinstance(column, np.ndarray) else column for column in columns)
    return type(columns)(*as_list)


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
