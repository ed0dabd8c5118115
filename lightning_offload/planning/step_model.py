"""A model of a training step at any batch size, or any shape, fitted to steps recorded at two or more.

:meth:`StepModel.fit` takes the recorded graphs, by batch size, or by the numbers that vary in the shapes of what steps
are given; :meth:`StepModel.at` gives the graph of one that was not recorded, good for planning. Structure is taken
over; bytes and seconds follow the laws of :mod:`~.scaling_laws`, one for each storage and op, so a step is predicted
tensor by tensor and planned as if it had been recorded. With fake recordings all bytes are exact but for the shortfalls
named there.

Structure often changes between sizes 1 and 2, where libraries leave copies out. So the sizes to record are 2 and
more; a graph predicted for size 1 has the structure of the larger ones.

The same structure. Kernels, views and copies may depend on the batch size: at 1 a copy is often left out, and the
step has fewer ops. Two steps have the same structure if the same ops read and make the same values at the same ticks
and autograd saved and read back the same of them. When a storage dies may differ, where Python's garbage collector
lets go of it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from lightning_offload.errors import TuningError
from lightning_offload.graph.step_graph import StepGraph, Storage
from lightning_offload.planning.scaling_laws import (
    DurationFit,
    Feature,
    Floats,
    Point,
    ShapeLaws,
    SizeLaw,
    covering_line,
    exact_bytes,
    fit_seconds,
    given_bytes,
)

Row = tuple[str, Hashable]
"""What a row of a graph is called, and what must be the same."""

Size = int | Point
"""A batch size; or, where shapes vary in another way or in several, the numbers that do."""

Graphs = Mapping[int, StepGraph] | Mapping[Point, StepGraph]
"""Steps by size."""


def same_structure(graphs: Graphs) -> tuple[Size, ...]:
    """The sizes of most graphs that have the same structure, ascending.

    Args:
        graphs: By size.

    Returns:
        Of groups of the same length, the one of the larger sizes; a single size where no two agree.
    """
    by_size: dict[Any, StepGraph] = dict(graphs)
    groups: dict[str, list[Any]] = {}
    for size in sorted(by_size):
        groups.setdefault(structure_of(by_size[size]), []).append(size)
    largest = max(map(len, groups.values()))
    return tuple(max(group for group in groups.values() if len(group) == largest))


def structure_of(graph: StepGraph) -> str:
    """A fingerprint of a graph's structure: of all but bytes and seconds, and how long storages live."""
    hasher = hashlib.sha256()
    for _, what in _rows(graph):
        hasher.update(repr(what).encode())
    return hasher.hexdigest()[:32]


def difference(first: StepGraph, second: StepGraph) -> str | None:
    """Where the structures of two graphs part, for a message; None where they are the same."""
    rows = itertools.zip_longest(_rows(first), _rows(second), fillvalue=("the step is over", None))
    for mine, others in rows:
        if mine != others:
            return f"{mine[0]} at one and {others[0]} at the other"
    return None


def _rows(graph: StepGraph) -> Iterator[Row]:
    """What makes the structure; ops first, since what they do differently explains the rest."""
    for i, op in enumerate(graph.ops):
        where = f" in `{op.module}`" if op.module else ""
        yield f"op {i} is {op.name}{where}", (op.name, op.phase, op.tick, op.inputs, op.outputs)
    for i, save in enumerate(graph.saves):
        title = f"save {i} is of value {save.value} at tick {save.pack_tick}, read {len(save.unpack_ticks)} times"
        yield title, (save.value, save.pack_tick, save.unpack_ticks)
    for i, value in enumerate(graph.values):
        yield f"value {i} is made by op {value.producer} on storage {value.storage}", (value.storage, value.producer)
    for i, storage in enumerate(graph.storages):
        yield f"storage {i} is made at tick {storage.birth}", storage.birth
    yield f"the step takes {graph.num_ticks} ticks", graph.num_ticks


_GIVEN = ("extra_bytes", "gradient_bytes", "old_gradient_bytes", "accumulated_bytes")


class Figures(NamedTuple):
    """What of a step depends on its size.

    Attributes:
        storage_bytes: By storage.
        workspace_bytes: By op.
        seconds: By op.
        given: Bytes of the step itself, by the name of the graph's field.
    """

    storage_bytes: npt.NDArray[np.int64]
    workspace_bytes: npt.NDArray[np.int64]
    seconds: Floats
    given: dict[str, int]


class _Laws(NamedTuple):
    """The laws of many figures, of which most are the same: each law once, and which one is whose."""

    laws: tuple[SizeLaw, ...]
    of: npt.NDArray[np.int64]

    def at(self, point: Point) -> npt.NDArray[np.int64]:
        found: npt.NDArray[np.int64] = np.array([law.at(point) for law in self.laws], dtype=np.int64)[self.of]
        return found


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepModel:
    """A training step at any size, fitted to recorded ones by :meth:`fit`.

    Attributes:
        sizes: Sizes that it was fitted to, ascending.
        num_inexact: Storages whose sizes follow no simple law; they are predicted rather too large.
        structure: The step at the largest of the sizes, with what the others allow.
    """

    sizes: tuple[Size, ...]
    num_inexact: int
    structure: StepGraph = dataclasses.field(repr=False)
    _storages: _Laws = dataclasses.field(repr=False)
    _workspaces: _Laws = dataclasses.field(repr=False)
    _seconds: DurationFit = dataclasses.field(repr=False)
    _given: Mapping[str, SizeLaw] = dataclasses.field(repr=False)
    _growth: _Growth = dataclasses.field(repr=False)

    @classmethod
    def fit(cls, graphs: Graphs) -> StepModel:
        """Fit a model to recorded steps.

        Args:
            graphs: Steps of one model on one device: by batch size, or by the numbers that vary in the shapes of what
                they are given, as many in each. Where their structures differ, the largest group that agrees is taken.

        Raises:
            TuningError: Fewer than two graphs, sizes that are not positive integers, or no two graphs that agree.
        """
        for size in graphs:
            check_size(size)
        if len(graphs) < 2:
            raise TuningError(
                f"steps at {len(graphs)} batch sizes ({_listed(tuple(graphs))}) do not tell how a step grows: "
                "record it at two sizes or more, such as 2 and 4"
            )
        by_size: dict[Any, StepGraph] = dict(graphs)
        sizes = same_structure(graphs)
        if len(sizes) < 2:
            *_, low, high = sorted(by_size)
            raise TuningError(
                f"no two of the steps at batch sizes {_listed(sorted(by_size))} are alike, so none can be "
                f"predicted from another; those at {low} and {high}: {difference(by_size[low], by_size[high])}. "
                "Record other sizes of at least 2, with all else the same"
            )
        return _fit(sizes, [by_size[size] for size in sizes])

    def figures_at(self, size: Size) -> Figures:
        """What of the step at a size is not structure.

        Raises:
            TuningError: The size is not one of positive integers.
        """
        point = check_size(size)
        storage_bytes = self._storages.at(point)
        given = {name: law.at(point) for name, law in self._given.items()}
        given["old_gradient_bytes"] = max(given["old_gradient_bytes"], given["accumulated_bytes"])
        return Figures(
            storage_bytes=storage_bytes,
            workspace_bytes=self._workspaces.at(point),
            seconds=self._seconds.at(self._growth.at(point, storage_bytes)),
            given=given,
        )

    def sized(self, figures: Figures) -> StepGraph:
        """The step at a size, but for its ops, which are those of the largest one: in a tenth of the time."""
        storages = tuple(map(_storage_like, self.structure.storages, figures.storage_bytes.tolist()))
        given: dict[str, Any] = figures.given
        return dataclasses.replace(self.structure, storages=storages, **given)

    def at(self, size: Size) -> StepGraph:
        """The step at a size.

        Raises:
            TuningError: The size is not one of positive integers.
        """
        figures = self.figures_at(size)
        found = zip(self.structure.ops, figures.seconds.tolist(), figures.workspace_bytes.tolist(), strict=True)
        ops = (dataclasses.replace(op, seconds=seconds, workspace_bytes=num_bytes) for op, seconds, num_bytes in found)
        return dataclasses.replace(self.sized(figures), ops=tuple(ops))


def check_size(size: object) -> Point:
    """A batch size, or the numbers that vary in shapes, as a point.

    Raises:
        TuningError: They are not positive integers.
    """
    point = size if isinstance(size, tuple) and size else (size,)
    for number in point:
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise TuningError(f"batch size {size!r} is not a positive integer")
    return cast(Point, point)


class _Growth(NamedTuple):
    """What the durations of ops grow with.

    The batch size, or for ops that touch storages of pairs of samples the bytes that they touch; these for all ops
    where shapes vary.

    Attributes:
        op: The ops of what is touched, flat.
        storage: The storages that these ops read or make.
        is_plain: By op: whether it grows with the batch size.
    """

    op: npt.NDArray[np.int64]
    storage: npt.NDArray[np.int64]
    is_plain: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, structure: StepGraph, storages: _Laws, *, is_batch: bool) -> _Growth:
        touched = [
            (i, s)
            for i, op in enumerate(structure.ops)
            for s in {structure.values[v].storage for v in (*op.inputs, *op.outputs)}
        ]
        flat = np.array(touched, dtype=np.int64).reshape(-1, 2)
        of_pairs = np.array([not is_batch or law.polynomial.square > 0 for law in storages.laws], dtype=bool)[
            storages.of
        ]
        is_plain = np.ones(len(structure.ops), dtype=bool)
        is_plain[flat[of_pairs[flat[:, 1]], 0]] = False
        return cls(flat[:, 0], flat[:, 1], is_plain)

    def at(self, point: Point, storage_bytes: npt.NDArray[np.int64]) -> Floats:
        """By op: what its duration grows with."""
        touched = np.bincount(self.op, weights=storage_bytes[self.storage], minlength=len(self.is_plain))
        return np.where(self.is_plain, float(point[0]), touched)


def _fit(sizes: tuple[Size, ...], graphs: Sequence[StepGraph]) -> StepModel:
    is_batch = not isinstance(sizes[0], tuple)
    points = [check_size(size) for size in sizes]
    by_size = np.argsort([sum(s.num_bytes for s in g.storages) for g in graphs], kind="stable")
    structure = _merged([graphs[i] for i in by_size])
    exact, covering, of_the_step = _finders(points, is_batch=is_batch)
    seen_bytes = [[s.num_bytes for s in g.storages] for g in graphs]
    storages = _laws(exact, seen_bytes)
    growths = _Growth.of(structure, storages, is_batch=is_batch)
    seen = np.array([[op.seconds for op in g.ops] for g in graphs], dtype=np.float64).reshape(len(graphs), -1)
    growth = np.array([growths.at(point, storages.at(point)) for point in points])
    seconds = fit_seconds(growth[by_size], seen[by_size], growths.is_plain)
    inexact = np.array([storages.at(point) for point in points]) != np.array(seen_bytes).reshape(len(graphs), -1)
    return StepModel(
        sizes=sizes,
        num_inexact=int(inexact.any(axis=0).sum()),
        structure=structure,
        _storages=storages,
        _workspaces=_laws(covering, [[op.workspace_bytes for op in g.ops] for g in graphs]),
        _seconds=seconds,
        _given={name: of_the_step([getattr(g, name) for g in graphs]) for name in _GIVEN},
        _growth=growths,
    )


_Find = Callable[[Sequence[int]], SizeLaw]


def _finders(points: Sequence[Point], *, is_batch: bool) -> tuple[_Find, _Find, _Find]:
    """What finds the laws of storages, of workspaces, and of bytes of the step itself."""
    if not is_batch:
        laws = ShapeLaws(points)
        return laws, laws, lambda seen: laws([max(seen)] * len(points))
    feature, sizes = Feature((1,), (1,)), [point[0] for point in points]
    return (
        lambda seen: SizeLaw(feature, exact_bytes(sizes, seen)),
        lambda seen: SizeLaw(feature, covering_line(sizes, seen)),
        lambda seen: SizeLaw(feature, given_bytes(sizes, seen)),
    )


def _laws(find: _Find, seen: Sequence[Sequence[int]]) -> _Laws:
    """The laws of columns; ops and storages of one size are many, and fitted once."""
    known: dict[tuple[int, ...], int] = {}
    of = [known.setdefault(column, len(known)) for column in zip(*seen, strict=True)]
    return _Laws(tuple(find(column) for column in known), np.array(of, dtype=np.int64))


def _merged(graphs: Sequence[StepGraph]) -> StepGraph:
    """The structure, with the longest lives that were seen, and only those freedoms that all of them have."""
    like = graphs[-1]
    return dataclasses.replace(
        like,
        ops=tuple(
            dataclasses.replace(ops[-1], replayable=all(op.replayable for op in ops))
            for ops in zip(*(g.ops for g in graphs), strict=True)
        ),
        storages=tuple(
            dataclasses.replace(group[-1], death=max(s.death for s in group))
            for group in zip(*(g.storages for g in graphs), strict=True)
        ),
        saves=tuple(
            dataclasses.replace(
                group[-1],
                release_tick=max(s.release_tick for s in group),
                must_keep=any(s.must_keep for s in group),
            )
            for group in zip(*(g.saves for g in graphs), strict=True)
        ),
    )


def _storage_like(storage: Storage, num_bytes: int) -> Storage:
    if storage.num_bytes == num_bytes:
        return storage
    return Storage(num_bytes=num_bytes, birth=storage.birth, death=storage.death)


def _listed(sizes: Sequence[object]) -> str:
    return ", ".join(map(str, sizes)) or "none"
