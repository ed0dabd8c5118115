"""A model of a training step at any batch size, fitted to steps recorded at two or more sizes.

:meth:`StepModel.fit` takes the recorded graphs, by batch size; :meth:`StepModel.at` gives the graph of a size that
was not recorded, good for planning. Structure is taken over; bytes and seconds follow the laws of
:mod:`~.scaling_laws`, one for each storage and op, so a step is predicted tensor by tensor and planned as if it had
been recorded. With fake recordings all bytes are exact but for the shortfalls named there.

Structure often changes between sizes 1 and 2, where libraries leave copies out. So the sizes to record are 2 and
more; a graph predicted for size 1 has the structure of the larger ones.

The same structure. Kernels, views and copies may depend on the batch size: at 1 a copy is often left out, and the
step has fewer ops. Two steps have the same structure if the same ops read and make the same values at the same ticks
and autograd saved and read back the same of them. When a storage dies may differ, where Python's garbage collector
lets go of it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Hashable, Iterator, Mapping, Sequence

import numpy as np

from lightning_offload.errors import TuningError
from lightning_offload.graph.step_graph import Op, StepGraph, Storage
from lightning_offload.tuning.scaling_laws import (
    DurationFit,
    FitBytes,
    Floats,
    SizePolynomial,
    covering_line,
    exact_bytes,
    fit_seconds,
    given_bytes,
    is_exact,
)

Row = tuple[str, Hashable]
"""What a row of a graph is called, and what must be the same."""


def same_structure(graphs: Mapping[int, StepGraph]) -> tuple[int, ...]:
    """The batch sizes of most graphs that have the same structure, ascending.

    Args:
        graphs: By batch size.

    Returns:
        Of groups of the same length, the one of the larger sizes; a single size where no two agree.
    """
    groups: dict[Hashable, list[int]] = {}
    for size in sorted(graphs):
        groups.setdefault(tuple(_rows(graphs[size])), []).append(size)
    largest = max(map(len, groups.values()))
    return tuple(max(group for group in groups.values() if len(group) == largest))


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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepModel:
    """A training step at any batch size, fitted to recorded ones by :meth:`fit`.

    Attributes:
        sizes: Batch sizes it was fitted to, ascending.
        left_out: Those of graphs whose structure is another one.
        num_inexact: Storages whose sizes follow no simple law; they are predicted rather too large.
        seconds_error: By what share the sum of the ops' seconds at one of the sizes is off, at most. Always small
            with two sizes; with more, it tells how far the step is from ``a + b*n`` seconds.
        structure: The step at the largest of the sizes, with what the others allow.
        storage_laws: Bytes by storage.
        workspace_laws: Workspace bytes by op.
        second_laws: Durations by op.
        given_laws: Bytes of the step itself, by the name of the graph's field.
    """

    sizes: tuple[int, ...]
    left_out: tuple[int, ...]
    num_inexact: int
    seconds_error: float
    structure: StepGraph = dataclasses.field(repr=False)
    storage_laws: tuple[SizePolynomial, ...] = dataclasses.field(repr=False)
    workspace_laws: tuple[SizePolynomial, ...] = dataclasses.field(repr=False)
    second_laws: DurationFit = dataclasses.field(repr=False)
    given_laws: Mapping[str, SizePolynomial] = dataclasses.field(repr=False)

    @classmethod
    def fit(cls, graphs: Mapping[int, StepGraph]) -> StepModel:
        """Fit a model to recorded steps.

        Args:
            graphs: By batch size: steps of one model on one device. Where their structures differ, the largest group
                that agrees is taken.

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
        sizes = same_structure(graphs)
        if len(sizes) < 2:
            *_, low, high = sorted(graphs)
            raise TuningError(
                f"no two of the steps at batch sizes {_listed(tuple(sorted(graphs)))} are alike, so none can be "
                f"predicted from another; those at {low} and {high}: {difference(graphs[low], graphs[high])}. "
                "Record other sizes of at least 2, with all else the same"
            )
        return _fit(sizes, [graphs[n] for n in sizes], tuple(sorted(set(graphs) - set(sizes))))

    def at(self, batch_size: int) -> StepGraph:
        """The step at a batch size.

        Raises:
            TuningError: The size is not a positive integer.
        """
        check_size(batch_size)
        like = self.structure
        given = {name: law.at(batch_size) for name, law in self.given_laws.items()}
        durations = self.second_laws.at(_growth(batch_size, like, self.storage_laws)).tolist()
        return dataclasses.replace(
            like,
            ops=tuple(map(_op_like, like.ops, durations, (law.at(batch_size) for law in self.workspace_laws))),
            storages=tuple(
                Storage(num_bytes=law.at(batch_size), birth=s.birth, death=s.death)
                for s, law in zip(like.storages, self.storage_laws, strict=True)
            ),
            extra_bytes=given["extra_bytes"],
            gradient_bytes=given["gradient_bytes"],
            old_gradient_bytes=max(given["old_gradient_bytes"], given["accumulated_bytes"]),
            accumulated_bytes=given["accumulated_bytes"],
        )


def check_size(batch_size: object) -> int:
    """A batch size, checked.

    Raises:
        TuningError: It is not a positive integer.
    """
    if not isinstance(batch_size, int) or isinstance(batch_size, bool) or batch_size < 1:
        raise TuningError(f"batch size {batch_size!r} is not a positive integer")
    return batch_size


def _fit(sizes: tuple[int, ...], graphs: Sequence[StepGraph], left_out: tuple[int, ...]) -> StepModel:
    structure = _merged(graphs)
    storages = _laws(exact_bytes, sizes, [[s.num_bytes for s in g.storages] for g in graphs])
    seen = np.array([[op.seconds for op in g.ops] for g in graphs], dtype=np.float64).reshape(len(graphs), -1)
    growth = np.array([_growth(n, structure, storages) for n in sizes])
    seconds = fit_seconds(growth, seen, (growth == np.array(sizes)[:, None]).all(axis=0))
    total, predicted = seen.sum(axis=1), seconds.at(growth).sum(axis=1)
    seen_bytes = zip(*([s.num_bytes for s in g.storages] for g in graphs), strict=True)
    return StepModel(
        sizes=sizes,
        left_out=left_out,
        num_inexact=sum(not is_exact(law, sizes, seen) for law, seen in zip(storages, seen_bytes, strict=True)),
        seconds_error=float(np.max(np.abs(predicted - total) / np.where(total > 0, total, 1.0))),
        structure=structure,
        storage_laws=storages,
        workspace_laws=_laws(covering_line, sizes, [[op.workspace_bytes for op in g.ops] for g in graphs]),
        second_laws=seconds,
        given_laws={name: given_bytes(sizes, [getattr(g, name) for g in graphs]) for name in _GIVEN},
    )


def _laws(fit: FitBytes, sizes: Sequence[int], seen: Sequence[Sequence[int]]) -> tuple[SizePolynomial, ...]:
    """One law for each column; ops and storages of one size are many, and fitted once."""
    known: dict[tuple[int, ...], SizePolynomial] = {}
    columns = list(zip(*seen, strict=True))
    for column in columns:
        if column not in known:
            known[column] = fit(sizes, column)
    return tuple(known[column] for column in columns)


def _growth(batch_size: int, structure: StepGraph, storages: Sequence[SizePolynomial]) -> Floats:
    """By op: what its duration grows with: the batch size, or where it touches storages of pairs of samples, bytes."""
    of_pairs = {i for i, law in enumerate(storages) if law.square > 0}
    growth = np.full(len(structure.ops), float(batch_size))
    for i, op in enumerate(structure.ops if of_pairs else ()):
        touched = {structure.values[v].storage for v in (*op.inputs, *op.outputs)}
        if not touched.isdisjoint(of_pairs):
            growth[i] = sum(storages[s].at(batch_size) for s in touched)
    return growth


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


def _op_like(op: Op, seconds: float, workspace_bytes: int) -> Op:
    return Op(
        name=op.name,
        module=op.module,
        phase=op.phase,
        tick=op.tick,
        seconds=seconds,
        inputs=op.inputs,
        outputs=op.outputs,
        replayable=op.replayable,
        workspace_bytes=workspace_bytes,
        unreplayed=op.unreplayed,
    )


def _listed(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes)) or "none"
