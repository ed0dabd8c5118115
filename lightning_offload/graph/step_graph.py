"""One recorded training step: ops, storages, their values, and what autograd saved.

Time inside a step is counted in *ticks*: every dispatched op, every pack and every unpack is one tick, in the
order in which they happened. A storage is alive at ticks ``birth <= t < death`` through the program's own
references; what autograd saved keeps it alive longer, and that part is what a plan decides about. ``birth`` is
-1 for storages that existed before the step (parameters, buffers, the batch), ``death`` is ``num_ticks`` for
those that outlive it (gradients). A storage that the program gives another size has several *lives*, a row each.

A *value* is the contents of a storage between two writes: an op that writes in place makes a new value on the
same storage, a view makes none.
"""

from __future__ import annotations

import bisect
import dataclasses
import fnmatch
import functools
import hashlib
import itertools
from collections.abc import Callable, Iterable
from typing import Any, Literal, TypeVar

from lightning_offload.errors import PlanError
from lightning_offload.graph import codec

Phase = Literal["forward", "backward"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One dispatched op.

    Attributes:
        name: Qualified overload, e.g. ``aten.convolution.default``.
        module: Qualified name of the innermost module that ran it, "" where none is known.
        phase: Whether autograd was running backward.
        tick: When it ran.
        seconds: Its duration, measured or modelled.
        inputs: Values it reads.
        outputs: Values it makes, on new storages or on storages that it wrote.
        replayable: Whether running it again on the same values gives the same bits, without side effects.
        workspace_bytes: Device memory that it needs beyond its inputs and outputs while it runs, and that is gone
            after it; 0 where that is not known.
        unreplayed: Outputs that a replay of the op does not make: the running statistics of batch norm.
    """

    name: str
    module: str
    phase: Phase
    tick: int
    seconds: float
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    replayable: bool
    workspace_bytes: int = dataclasses.field(default=0, metadata=codec.ADDED)
    unreplayed: tuple[int, ...] = dataclasses.field(default=(), metadata=codec.ADDED)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """A piece of device memory.

    Attributes:
        num_bytes: Size.
        birth: Tick of the op that allocated it, -1 if it existed before the step; 0 if it did and a resize ended it.
        death: First tick at which the program's own references are gone; ``num_ticks`` if they outlive the step.
    """

    num_bytes: int
    birth: int
    death: int

    @property
    def is_persistent(self) -> bool:
        """Whether it existed before the step: a parameter, a buffer, the batch, state of the optimizer."""
        return self.birth < 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """The contents of a storage between two writes; ``producer`` is an op, or -1 if no op made it."""

    storage: int
    producer: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """One tensor that autograd packed.

    Attributes:
        value: What it holds.
        pack_tick: When it was saved.
        unpack_ticks: When it was read back, in order.
        release_tick: First tick at which autograd had dropped it; ``num_ticks`` if it never did.
        module: Qualified name of the module that saved it.
        must_keep: Whether only keeping it is exact (unsupported layout, written after it was saved, ...).
    """

    value: int
    pack_tick: int
    unpack_ticks: tuple[int, ...]
    release_tick: int
    module: str
    must_keep: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Departure:
    """Memory from before the step that no op of it touched, and that the program drops within it.

    What the step before left behind is such, where the program holds it until there is another: ``out = model(x)``.

    Attributes:
        tick: From which on it is free.
        num_bytes: How much; a part of the graph's ``extra_bytes``.
    """

    tick: int
    num_bytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MadeGradient:
    """A gradient that backward made, of a parameter that had none.

    Attributes:
        storage: Where it lies.
        tick: From which on it would be gone, had it been added to an earlier step's.
    """

    storage: int
    tick: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Accumulation:
    """Gradients of earlier steps that may be there together in backward.

    Attributes:
        idle_bytes: Those that backward leaves alone: another model's.
        added_to_bytes: Those that it adds its own to, which are gone then.
    """

    idle_bytes: int = 0
    added_to_bytes: int = 0

    @property
    def num_bytes(self) -> int:
        """Both."""
        return self.idle_bytes + self.added_to_bytes

    def without(self, num_bytes: int) -> Accumulation:
        """What is left without so many bytes, those that are added to above all."""
        added_to = max(0, self.added_to_bytes - num_bytes)
        idle = max(0, self.idle_bytes - max(0, num_bytes - self.added_to_bytes))
        return Accumulation(idle_bytes=idle, added_to_bytes=added_to)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepGraph:
    """A recorded step: its ops, the storages they worked on, and what autograd saved; the module defines ticks.

    Attributes:
        num_ticks: Length of the step in ticks.
        extra_bytes: Persistent bytes on the device that no op of the step touched (optimizer state above all).
        gradient_bytes: Gradients that backward will leave behind, where it was not observed; else 0.
        old_gradient_bytes: Gradients of earlier steps that may be there before backward, beyond those recorded.
        accumulated_bytes: The part of them that may still be there in backward.
        accumulations: What these are, for each of those steps that may need most; none where they all stay.
        block_bytes: What the device's allocator rounds sizes up to a multiple of; sizes here are tensors' own.
        departures: When parts of ``extra_bytes`` are dropped, in order.
        made_gradients: Those that were recorded, in the order of their ticks.
    """

    num_ticks: int
    ops: tuple[Op, ...]
    storages: tuple[Storage, ...]
    values: tuple[Value, ...]
    saves: tuple[Save, ...]
    extra_bytes: int = 0
    gradient_bytes: int = 0
    old_gradient_bytes: int = 0
    accumulated_bytes: int = 0
    block_bytes: int = dataclasses.field(default=1, metadata=codec.ADDED)
    departures: tuple[Departure, ...] = dataclasses.field(default=(), metadata=codec.ADDED)
    accumulations: tuple[Accumulation, ...] = dataclasses.field(default=(), metadata=codec.ADDED)
    made_gradients: tuple[MadeGradient, ...] = dataclasses.field(default=(), metadata=codec.ADDED)

    @property
    def persistent_bytes(self) -> int:
        """Bytes on the device that existed before the step."""
        return self.extra_bytes + sum(s.num_bytes for s in self.storages if s.is_persistent)

    @property
    def seconds(self) -> float:
        """Sum of the ops' durations."""
        return sum(op.seconds for op in self.ops)

    def allocated(self) -> StepGraph:
        """The same step with storages as large as what the allocator hands out for them."""
        if self.block_bytes == 1:
            return self
        storages = (dataclasses.replace(s, num_bytes=self.taken_bytes(s.num_bytes)) for s in self.storages)
        return dataclasses.replace(self, storages=tuple(storages), block_bytes=1)

    def taken_bytes(self, num_bytes: int) -> int:
        """What the allocator hands out for so many bytes."""
        return -(-num_bytes // self.block_bytes) * self.block_bytes

    def digest(self) -> str:
        """Fingerprint of the structure (ops, sizes, saves), not of what is measured: two runs of one model agree.

        It is the same of :meth:`allocated`.
        """
        hasher = _hash_of_ops(self).copy()
        values, storages, block = self.values, self.storages, self.block_bytes
        saved = [(save.value, storages[values[save.value].storage].num_bytes) for save in self.saves]
        hasher.update("".join([f"{v}|{-(-num_bytes // block) * block}\n" for v, num_bytes in saved]).encode())
        digest: str = hasher.hexdigest()[:32]
        return digest

    def storages_saved_in(self, patterns: Iterable[str]) -> frozenset[int]:
        """Storages saved by modules whose names match one of the patterns, as those of file names do."""
        patterns = tuple(patterns)
        return frozenset(
            self.values[save.value].storage
            for save in self.saves
            if any(fnmatch.fnmatchcase(save.module, pattern) for pattern in patterns)
        )

    def op_at(self, tick: int) -> Op | None:
        """The op that runs at a tick, or the next one after it; None past the last op."""
        place = bisect.bisect_left(self.ops, tick, key=lambda op: op.tick)
        return self.ops[place] if place < len(self.ops) else None

    def to_json(self) -> str:
        """Write the graph as JSON."""
        payload = codec.encode(self)
        for name in (*_ROWS, *_ROWS_ADDED):
            rows = payload.pop(name)
            if rows or name in _ROWS:
                payload[name] = codec.encode_rows(rows)
        return codec.dumps("step_graph", payload)

    @classmethod
    def from_json(cls, text: str) -> StepGraph:
        """Read a graph and check it.

        Raises:
            PlanError: Not a step graph, another schema version, or inconsistent (indices, sizes, cycles).
        """
        data = codec.loads("step_graph", text)
        for name, row in _ROWS.items():
            data[name] = codec.decode_rows(row, data.get(name), where=name)
        for name, row in _ROWS_ADDED.items():
            data[name] = codec.decode_rows(row, data.get(name, []), where=name)
        graph = codec.decode(cls, data, where="step_graph")
        check(graph)
        return graph


_ROWS: dict[str, type[Any]] = {"ops": Op, "storages": Storage, "values": Value, "saves": Save}
_ROWS_ADDED: dict[str, type[Any]] = {
    "departures": Departure,
    "accumulations": Accumulation,
    "made_gradients": MadeGradient,
}

_T = TypeVar("_T")
_NUM_REMEMBERED = 4  # structures; a budget is asked for more than once, other steps seldom


def by_structure(function: Callable[[StepGraph], _T]) -> Callable[[StepGraph], _T]:
    """Have a function of a graph remember what it gave for the last few structures.

    Those of one family of shapes share their ops, values and saves, and are told apart from others by the identity of
    these. So the function may look at neither sizes nor what the step itself takes, and nobody may change its results.
    """
    known: list[tuple[StepGraph, _T]] = []

    @functools.wraps(function)
    def remembering(graph: StepGraph) -> _T:
        for other, found in known:
            if graph.ops is other.ops and graph.values is other.values and graph.saves is other.saves:
                return found
        found = function(graph)
        known.insert(0, (graph, found))
        del known[_NUM_REMEMBERED:]
        return found

    return remembering


@by_structure
def _hash_of_ops(graph: StepGraph) -> Any:
    """The state of the hash of a graph's fingerprint after its ops; to be copied."""
    hasher = hashlib.sha256()
    for op in graph.ops:
        hasher.update(f"{op.name}|{op.inputs}|{op.outputs}\n".encode())
    return hasher


def check(graph: StepGraph) -> None:
    """Check sizes, indices, order and acyclicity of a graph.

    Raises:
        PlanError: Names the first row that is wrong.
    """
    sizes = (graph.num_ticks, graph.extra_bytes, graph.gradient_bytes, graph.accumulated_bytes)
    _expect(min(sizes) >= 0 and graph.old_gradient_bytes >= graph.accumulated_bytes, "negative size")
    for i, found in enumerate(graph.accumulations):
        ok = min(found.idle_bytes, found.added_to_bytes) >= 0 and found.num_bytes <= graph.accumulated_bytes
        _expect(ok, f"accumulations[{i}] has a negative size or more than is accumulated: {found}")
    _expect(graph.block_bytes >= 1, f"blocks of {graph.block_bytes} bytes")
    departures = graph.departures
    for i, departure in enumerate(departures):
        ok = 0 <= departure.tick <= graph.num_ticks and departure.num_bytes >= 0
        _expect(ok, f"departures[{i}] has a negative size or is outside the graph: {departure}")
    _expect(sum(d.num_bytes for d in departures) <= graph.extra_bytes, "more departs than was there")
    last_tick = -1
    for i, gradient in enumerate(graph.made_gradients):
        ok = 0 <= gradient.storage < len(graph.storages) and last_tick <= gradient.tick <= graph.num_ticks
        _expect(ok, f"made_gradients[{i}] is out of order or points outside the graph: {gradient}")
        last_tick = gradient.tick
    for i, storage in enumerate(graph.storages):
        ok = storage.num_bytes >= 0 and -1 <= storage.birth <= storage.death <= graph.num_ticks
        _expect(ok, f"storages[{i}] has a negative size or a death before its birth: {storage}")
    for i, value in enumerate(graph.values):
        ok = 0 <= value.storage < len(graph.storages) and -1 <= value.producer < len(graph.ops)
        _expect(ok, f"values[{i}] points outside the graph: {value}")
    last_tick = -1
    for i, op in enumerate(graph.ops):
        _expect(last_tick < op.tick < graph.num_ticks and op.seconds >= 0, f"ops[{i}] is out of order: {op}")
        _expect(op.workspace_bytes >= 0, f"ops[{i}] has a negative workspace: {op}")
        last_tick = op.tick
        for value_id in (*op.inputs, *op.outputs):
            _expect(0 <= value_id < len(graph.values), f"ops[{i}] points outside the graph: value {value_id}")
        cyclic = any(graph.values[v].producer >= i for v in op.inputs)
        _expect(not cyclic, f"ops[{i}] reads a value that is made later: the graph has a cycle")
        _expect(all(graph.values[v].producer == i for v in op.outputs), f"ops[{i}] does not make its outputs")
        _expect(set(op.unreplayed) <= set(op.outputs), f"ops[{i}] leaves out what it does not make")
    for i, save in enumerate(graph.saves):
        ticks = (save.pack_tick, *save.unpack_ticks)
        ok = 0 <= save.value < len(graph.values) and all(a <= b for a, b in itertools.pairwise(ticks))
        ok = ok and ticks[0] >= 0 and ticks[-1] < graph.num_ticks
        ok = ok and ticks[-1] <= save.release_tick <= graph.num_ticks
        _expect(ok, f"saves[{i}] points outside the graph or is out of order: {save}")


@by_structure
def last_values(graph: StepGraph) -> dict[int, int]:
    """The last value that each storage holds, by storage; of one that is saved, until backward has read it back.

    What is written there afterwards, as by a kernel that makes gradients in the memory of what was saved, matters to
    nobody who reads what was saved.
    """
    read_until: dict[int, int] = {}
    for save in graph.saves:
        storage = graph.values[save.value].storage
        if save.unpack_ticks and not graph.storages[storage].is_persistent:
            read_until[storage] = max(read_until.get(storage, -1), save.unpack_ticks[-1])
    last: dict[int, int] = {}
    for i, value in enumerate(graph.values):
        until = read_until.get(value.storage, graph.num_ticks)
        is_late = value.producer >= 0 and graph.ops[value.producer].tick > until
        if not is_late or value.storage not in last:
            last[value.storage] = i
    return last


def _expect(ok: bool, message: str) -> None:
    if not ok:
        raise PlanError(f"inconsistent step graph: {message}")
