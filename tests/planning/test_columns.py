"""Columns that are as new for each simulation."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from lightning_offload.planning.arrays import Buffers
from lightning_offload.planning.columns import Workspace


class Inner(NamedTuple):
    """Columns within columns."""

    whole: Any
    flags: Any


class Outer(NamedTuple):
    """Columns of several types, an empty one among them."""

    real: Any
    inner: Inner
    none: Any


def made(new: Buffers) -> Outer:
    """Columns that do not begin with zeros."""
    flags = new.copy(np.array([True, False]))
    return Outer(real=new.real(2, 0.5), inner=Inner(whole=new.whole(3, -1), flags=flags), none=new.whole(0))


def as_lists(columns: Outer) -> list[list[Any]]:
    """What columns of either form hold."""
    return [list(column) for column in (columns.real, *columns.inner, columns.none)]


def test_arrays_are_written_over() -> None:
    """The same memory each time, as it was made; columns do not overlap."""
    space = Workspace(lambda: made(Buffers(True)), is_reused=True)
    first = space.fresh()
    assert as_lists(first) == as_lists(made(Buffers(True)))
    assert isinstance(first.inner, Inner)
    first.real[:], first.inner.whole[:], first.inner.flags[:] = 7.0, 7, [False, True]
    assert as_lists(first) == [[7.0, 7.0], [7, 7, 7], [False, True], []]
    again = space.fresh()
    assert again is first
    assert as_lists(again) == as_lists(made(Buffers(True)))
    assert [column.flags["C_CONTIGUOUS"] for column in (again.real, *again.inner)] == [True] * 3


def test_lists_are_made_anew() -> None:
    """What one simulation holds no other one touches."""
    space = Workspace(lambda: made(Buffers(False)), is_reused=False)
    first = space.fresh()
    first.inner.whole[0] = 7
    assert space.fresh().inner.whole == [-1, -1, -1]
    assert first.inner.whole[0] == 7
