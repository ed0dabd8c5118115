"""The columns that simulations fill in, made once for many.

To make dozens of arrays takes longer than most compiled loops that fill them: half of what a search of many choices
took. So they are made once, arrays of one type behind one another, and copied over from how they were at first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

from lightning_offload.planning.arrays import Buffers
from lightning_offload.planning.kernels.buffers import (
    Buckets,
    Columns,
    Copies,
    Events,
    Gaps,
    Lanes,
    Needs,
    Resets,
    Room,
    Scratch,
    Space,
    Tiers,
    Transfers,
    Walk,
)
from lightning_offload.planning.kernels.prefetches import BLOCK
from lightning_offload.planning.problem import Problem

_T = TypeVar("_T", bound=tuple[Any, ...])


def with_resets(made: _T) -> tuple[_T, Resets]:
    """Columns, in memory that can be reset at once, and how they are now.

    Those that are neither of 64-bit integers nor of real numbers are left out of what is reset.

    Args:
        made: A named tuple of columns, or of such tuples: lists, or arrays.
    """
    leaves = list(_leaves(made))
    if leaves and isinstance(leaves[0], list):
        return made, Resets(leaves, [list(column) for column in leaves], [], [])
    place: dict[int, npt.NDArray[Any]] = {}
    both: list[tuple[npt.NDArray[Any], npt.NDArray[Any]]] = []
    for dtype in (np.int64, np.float64):
        alike = [array for array in leaves if array.dtype == dtype]
        at_first = np.concatenate([*alike, np.zeros(0, dtype=dtype)])
        column = at_first.copy()
        ends = np.cumsum([len(array) for array in alike])
        place |= {id(array): column[end - len(array) : end] for array, end in zip(alike, ends, strict=True)}
        both.append((column, at_first))
    (whole, whole_at_first), (real, real_at_first) = both
    return cast(_T, _rebuilt(made, place)), Resets((whole,), (whole_at_first,), (real,), (real_at_first,))


def _leaves(columns: Any) -> Iterator[Any]:
    for column in columns:
        yield from _leaves(column) if isinstance(column, tuple) else (column,)


def _rebuilt(columns: Any, place: Mapping[int, npt.NDArray[Any]]) -> Any:
    rebuilt = (_rebuilt(c, place) if isinstance(c, tuple) else place.get(id(c), c) for c in columns)
    return type(columns)(*rebuilt)


def walk_columns(problem: Problem, *, is_compiled: bool) -> Walk:
    """The columns of the static pass, as it begins with them."""
    new, step = Buffers(is_compiled), problem.columns(is_compiled)
    num_saved, num_wanted = len(step.size), len(step.wanted)
    num_values, num_ops = len(step.saved), len(step.op_seconds)
    return Walk(
        codes=new.copy(np.zeros(num_saved, dtype=np.int8)),
        no_memo=new.copy(np.zeros(len(problem.candidates), dtype=np.bool_)),
        needs=Needs(
            needed=new.whole(num_saved, -1),
            held=new.copy(step.release),
            stored=new.copy(step.release),
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


def space_of(problem: Problem, *, is_compiled: bool) -> Space:
    """The columns of simulations by loops of one form."""
    made = _Made(problem, is_compiled)
    walk, resets_of_walk = with_resets(walk_columns(problem, is_compiled=is_compiled))
    columns, resets = with_resets(made.columns())
    first, resets_of_first = with_resets(made.copies())
    second, resets_of_second = with_resets(made.copies())
    in_order = (False, True)
    return Space(walk, columns, first, second, in_order, resets_of_walk, resets, resets_of_first, resets_of_second)


class _Made:
    """Makes the columns for a problem."""

    def __init__(self, problem: Problem, is_compiled: bool) -> None:
        self._problem = problem
        self._new = Buffers(is_compiled)
        self._count = len(problem.candidates)
        self._num_ticks = problem.graph.num_ticks

    def columns(self) -> Columns:
        new, count = self._new, self._count
        return Columns(
            starts=new.real(self._num_ticks + 2),
            transfers=Transfers(
                on_disk=new.whole(count),
                release=new.whole(count, -1),
                prefetch=new.whole(count, -1),
                given=new.whole(count, -1),
            ),
            out_lanes=new.real(2),
            room=self._room(),
            tiers=Tiers(swapped=new.whole(count), away=new.real(count), delta=new.whole(self._num_ticks + 1)),
        )

    def copies(self) -> Copies:
        new, count = self._new, self._count
        return Copies(
            prefetch=new.whole(count, -1),
            room=self._room(),
            events=Events(self._buckets(), self._buckets(), self._buckets()),
            lanes=Lanes(
                out_end=new.real(count),
                in_end=new.real(count, -1.0),
                out=new.real(2),
                back=new.real(2),
                busy=new.whole(self._num_ticks + 1),
            ),
        )

    def _room(self) -> Room:
        new, size, num_unpacks = self._new, self._num_ticks + 2, len(self._problem.unpacks)
        num_blocks = num_unpacks // BLOCK + 1
        return Room(
            memory=new.whole(size),
            fetched=new.whole(size),
            later=new.whole(size),
            gaps=Gaps(new.whole(num_unpacks), new.whole(num_blocks), new.whole(num_blocks)),
            heap=new.whole(self._count),
            deadlines=new.real(2, np.inf),
            latest=new.real(self._count),
        )

    def _buckets(self) -> Buckets:
        new, count = self._new, self._count
        return Buckets(new.whole(count), new.whole(self._num_ticks + 2, -1), new.whole(count, -1))
