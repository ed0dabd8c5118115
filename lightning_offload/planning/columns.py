"""The columns that one simulation fills in, made once for many where that is faster.

To make dozens of arrays takes longer than most compiled loops that fill them: half of what a search of many choices
took. So arrays are made once, behind one another, and copied over from how they were. Lists, for the plain loops, are
made anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, NamedTuple, TypeVar, cast

import numpy as np
import numpy.typing as npt

from lightning_offload.planning.arrays import Buffers
from lightning_offload.planning.kernels.buffers import (
    Buckets,
    Copies,
    Events,
    Gaps,
    Lanes,
    Needs,
    Room,
    Scratch,
    Transfers,
)
from lightning_offload.planning.kernels.prefetches import BLOCK
from lightning_offload.planning.problem import Problem

_T = TypeVar("_T", bound=tuple[Any, ...])


class Workspace(Generic[_T]):
    """Columns that are as when they were made, again and again.

    All that was written is undone by one copy for each type of element.

    Args:
        make: Makes them: a named tuple of columns, or of such tuples.
        is_reused: Whether they are arrays, which the next call of :meth:`fresh` may write over.
    """

    def __init__(self, make: Callable[[], _T], *, is_reused: bool) -> None:
        self._make = make
        self._is_reused = is_reused
        self._columns: _T | None = None
        self._masters: list[tuple[npt.NDArray[Any], npt.NDArray[Any]]] = []

    def fresh(self) -> _T:
        """The columns, as they were made."""
        if not self._is_reused:
            return self._make()
        if self._columns is None:
            self._columns = self._placed(self._make())
        for column, master in self._masters:
            np.copyto(column, master)
        return self._columns

    def _placed(self, made: _T) -> _T:
        """The same columns, those of one type behind one another."""
        arrays = list(_leaves(made))
        place: dict[int, npt.NDArray[Any]] = {}
        for dtype in dict.fromkeys(array.dtype for array in arrays):
            alike = [array for array in arrays if array.dtype == dtype]
            master = np.concatenate(alike)
            column = master.copy()
            self._masters.append((column, master))
            ends = np.cumsum([len(array) for array in alike])
            place |= {id(array): column[end - len(array) : end] for array, end in zip(alike, ends, strict=True)}
        return cast(_T, _rebuilt(made, place))


def _leaves(columns: Any) -> Iterator[npt.NDArray[Any]]:
    for column in columns:
        yield from _leaves(column) if isinstance(column, tuple) else (column,)


def _rebuilt(columns: Any, place: Mapping[int, npt.NDArray[Any]]) -> Any:
    rebuilt = (_rebuilt(column, place) if isinstance(column, tuple) else place[id(column)] for column in columns)
    return type(columns)(*rebuilt)


class Walk(NamedTuple):
    """What the static pass reads and fills in: the codes of all saved storages, flags, needs, buffers."""

    codes: Any
    no_memo: Any
    needs: Needs
    scratch: Scratch

    @classmethod
    def of(cls, problem: Problem, *, is_compiled: bool) -> Walk:
        """The columns for a step, as a pass begins with them."""
        new, step = Buffers(is_compiled), problem.columns(is_compiled)
        num_saved, num_wanted = len(step.size), len(step.wanted)
        num_values, num_ops = len(step.saved), len(step.op_seconds)
        return cls(
            codes=new.copy(np.zeros(num_saved, dtype=np.int8)),
            no_memo=new.copy(np.zeros(len(problem.candidates), dtype=np.bool_)),
            needs=Needs(
                needed=new.whole(num_saved, -1),
                held=new.copy(step.release),
                stored=new.copy(step.dropped),
                seconds=new.real(num_wanted),
                num_calls=new.whole(num_wanted),
                transient=new.whole(num_wanted),
            ),
            scratch=Scratch(
                seen=new.whole(num_ops),
                stack=new.whole(len(step.inputs) + num_ops + 1),
                calls=new.whole(num_ops),
                readers=new.whole(num_values),
                own=new.whole(num_values),
                writer=new.whole(len(problem.graph.storages)),
                held_through=new.whole(num_values),
                stored_through=new.whole(num_values),
            ),
        )


class Columns(NamedTuple):
    """What is filled in before copies back are placed."""

    walk: Walk
    starts: Any
    transfers: Transfers
    out_lanes: Any
    room: Room


class Space:
    """The columns of simulations by loops of one form.

    Args:
        problem: The step.
        is_compiled: The form.

    Attributes:
        columns: Of the passes before copies back are placed.
        copies: Of those that place them, for either order.
    """

    def __init__(self, problem: Problem, *, is_compiled: bool) -> None:
        self._problem = problem
        self._is_compiled = is_compiled
        self._new = Buffers(is_compiled)
        self.columns = Workspace(self._columns, is_reused=is_compiled)
        self.copies = tuple(Workspace(self._copies, is_reused=is_compiled) for _ in range(2))

    def _columns(self) -> Columns:
        new, count, num_ticks = self._new, len(self._problem.candidates), self._problem.graph.num_ticks
        return Columns(
            walk=Walk.of(self._problem, is_compiled=self._is_compiled),
            starts=new.real(num_ticks + 2),
            transfers=Transfers(on_disk=new.whole(count), release=new.whole(count, -1), prefetch=new.whole(count, -1)),
            out_lanes=new.real(2),
            room=self._room(),
        )

    def _copies(self) -> Copies:
        new, count, num_ticks = self._new, len(self._problem.candidates), self._problem.graph.num_ticks
        return Copies(
            prefetch=new.whole(count, -1),
            room=self._room(),
            events=Events(self._buckets(), self._buckets(), self._buckets()),
            lanes=Lanes(new.real(count), new.real(count, -1.0), new.real(2), new.real(2), new.whole(num_ticks + 1)),
        )

    def _room(self) -> Room:
        new, size, num_unpacks = self._new, self._problem.graph.num_ticks + 2, len(self._problem.unpacks)
        count, num_blocks = len(self._problem.candidates), num_unpacks // BLOCK + 1
        return Room(
            memory=new.whole(size),
            fetched=new.whole(size),
            later=new.whole(size),
            gaps=Gaps(new.whole(num_unpacks), new.whole(num_blocks), new.whole(num_blocks)),
            heap=new.whole(count),
            deadlines=new.real(2, np.inf),
            latest=new.real(count),
        )

    def _buckets(self) -> Buckets:
        new, count = self._new, len(self._problem.candidates)
        return Buckets(new.whole(count), new.whole(self._problem.graph.num_ticks + 2, -1), new.whole(count, -1))
