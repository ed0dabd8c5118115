"""Columns that are as new for each simulation."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from lightning_offload.planning.arrays import Buffers
from lightning_offload.planning.columns import with_resets
from lightning_offload.planning.kernels.simulation import reset


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


def test_arrays_are_reset_in_place() -> None:
    """The same memory each time, as it was made, but for flags; columns do not overlap."""
    columns, resets = with_resets(made(Buffers(True)))
    assert as_lists(columns) == as_lists(made(Buffers(True)))
    assert isinstance(columns.inner, Inner)
    columns.real[:], columns.inner.whole[:], columns.inner.flags[:] = 7.0, 7, [False, True]
    assert as_lists(columns) == [[7.0, 7.0], [7, 7, 7], [False, True], []]
    reset(resets)
    assert as_lists(columns) == [[0.5, 0.5], [-1, -1, -1], [False, True], []]
    assert [column.flags["C_CONTIGUOUS"] for column in (columns.real, *columns.inner)] == [True] * 3
    assert [len(part) for part in resets] == [1] * 4  # one copy for each type


def test_lists_are_reset_in_place() -> None:
    """What they are reset to is never written."""
    columns, resets = with_resets(made(Buffers(False)))
    whole = columns.inner.whole
    for _ in range(2):
        whole[0], columns.inner.flags[1], columns.real[1] = 7, True, 0.0
        reset(resets)
        assert as_lists(columns) == as_lists(made(Buffers(False)))
    assert columns.inner.whole is whole
