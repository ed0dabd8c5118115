"""Step graphs: exact round trips, and no corruption that goes unnoticed or ends in another error."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_offload.errors import PlanError
from lightning_offload.graph import StepGraph
from tests.graph.building import GraphBuilder, chain, step_graphs

OP_TICK, OP_SECONDS, OP_INPUTS, OP_OUTPUTS, OP_WORKSPACE = 3, 4, 5, 6, 8
SAVE_PACK, SAVE_UNPACKS, SAVE_RELEASE = 1, 2, 3


def _ops(row: int, field: int, item: Any) -> Callable[[dict[str, Any]], None]:
    return lambda data: data["ops"][row].__setitem__(field, item)


def _set(table: str, row: int, field: int, item: Any) -> Callable[[dict[str, Any]], None]:
    return lambda data: data[table][row].__setitem__(field, item)


CORRUPTIONS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "other kind": lambda data: data.update(lightning_offload="memory_plan"),
    "no kind": lambda data: data.pop("lightning_offload"),
    "newer schema": lambda data: data.update(schema=2),
    "schema as text": lambda data: data.update(schema="1"),
    "missing header field": lambda data: data.pop("num_ticks"),
    "no block": lambda data: data.update(block_bytes=0),
    "unknown header field": lambda data: data.update(colour="red"),
    "missing table": lambda data: data.pop("ops"),
    "table is no list": lambda data: data.update(ops={"a": 1}),
    "row is no list": lambda data: data["ops"].__setitem__(0, {"name": "x"}),
    "short row": lambda data: data["storages"][0].pop(),
    "long row": lambda data: data["values"][0].append(1),
    "op row without replayable": lambda data: data["ops"].__setitem__(0, data["ops"][0][:7]),
    "negative workspace": _ops(0, OP_WORKSPACE, -1),
    "float workspace": _ops(0, OP_WORKSPACE, 1.5),
    "float for int": _set("storages", 0, 0, 1.5),
    "bool for int": _set("storages", 0, 0, True),
    "text for int": _set("storages", 0, 0, "12"),
    "null for int": _set("storages", 0, 0, None),
    "int for bool": _ops(0, 7, 1),
    "int for text": _ops(0, 0, 7),
    "bool for float": _ops(0, OP_SECONDS, True),
    "text for float": _ops(0, OP_SECONDS, "fast"),
    "unknown phase": _ops(0, 2, "sideways"),
    "phase is a list": _ops(0, 2, ["forward"]),
    "inputs are an int": _ops(0, OP_INPUTS, 3),
    "input is text": _ops(0, OP_INPUTS, ["a"]),
    "NaN seconds": _ops(0, OP_SECONDS, float("nan")),
    "infinite seconds": _ops(0, OP_SECONDS, float("inf")),
    "seconds beyond a float": _ops(0, OP_SECONDS, 10**400),
    "negative seconds": _ops(0, OP_SECONDS, -1.0),
    "NaN bytes": _set("storages", 0, 0, float("nan")),
    "negative bytes": _set("storages", 0, 0, -1),
    "negative ticks": lambda data: data.update(num_ticks=-1),
    "negative extra bytes": lambda data: data.update(extra_bytes=-1),
    "negative gradient bytes": lambda data: data.update(gradient_bytes=-1),
    "more accumulated than old": lambda data: data.update(old_gradient_bytes=1, accumulated_bytes=2),
    "death before birth": _set("storages", 1, 2, -1),
    "death after the end": _set("storages", 1, 2, 10**6),
    "birth before -1": _set("storages", 0, 1, -2),
    "value on no storage": _set("values", 0, 0, 99),
    "value on storage -1": _set("values", 0, 0, -1),
    "value of no op": _set("values", 1, 1, 99),
    "value of op -2": _set("values", 1, 1, -2),
    "op reads no value": _ops(0, OP_INPUTS, [99]),
    "op makes no value": _ops(0, OP_OUTPUTS, [99]),
    "op reads value -1": _ops(0, OP_INPUTS, [-1]),
    "op makes another's value": _ops(1, OP_OUTPUTS, [1]),
    "op reads what it makes": _ops(0, OP_INPUTS, [1]),
    "op reads what is made later": _ops(0, OP_INPUTS, [2]),
    "ops out of order": lambda data: data["ops"][1].__setitem__(OP_TICK, data["ops"][0][OP_TICK]),
    "op after the end": _ops(-1, OP_TICK, 10**6),
    "op before the start": _ops(0, OP_TICK, -1),
    "save of no value": _set("saves", 0, 0, 99),
    "save of value -1": _set("saves", 0, 0, -1),
    "pack before the start": _set("saves", 0, SAVE_PACK, -1),
    "unpack before pack": _set("saves", 0, SAVE_UNPACKS, [0]),
    "unpacks out of order": _set("saves", 0, SAVE_UNPACKS, [9, 8]),
    "unpack after the end": _set("saves", 0, SAVE_UNPACKS, [10**6]),
    "release after the end": _set("saves", 0, SAVE_RELEASE, 10**6),
    "release before the pack": _set("saves", 0, SAVE_RELEASE, -7),
    "release before the unpack": lambda data: data["saves"][0].__setitem__(SAVE_RELEASE, data["saves"][0][1] + 1),
}


@given(graph=step_graphs(), extra=st.integers(0, 1 << 50))
def test_round_trip_is_exact(graph: StepGraph, extra: int) -> None:
    """A graph read from its own JSON equals it, and so does its digest."""
    graph = dataclasses.replace(graph, extra_bytes=extra, gradient_bytes=3, old_gradient_bytes=5, accumulated_bytes=4)
    again = StepGraph.from_json(graph.to_json())
    assert again == graph
    assert again.digest() == graph.digest()


def test_corrupt_graph_is_a_plan_error(subtests: pytest.Subtests) -> None:
    """Each way to break a file ends in a PlanError, never in another error and never in a graph."""
    for corruption in CORRUPTIONS:
        with subtests.test(corruption=corruption):
            data = json.loads(chain(40, 50, 60).to_json())
            CORRUPTIONS[corruption](data)
            with pytest.raises(PlanError):
                StepGraph.from_json(json.dumps(data))


TEXTS = ["", "{", "[]", "null", "7", '"step_graph"', "{}", "\x00", "[" * 50_000]


def test_text_that_is_no_graph_is_a_plan_error(subtests: pytest.Subtests) -> None:
    """Anything that is no JSON object of ours is refused."""
    for text in TEXTS:
        with subtests.test(text=text), pytest.raises(PlanError):
            StepGraph.from_json(text)


@given(graph=step_graphs(), data=st.data())
def test_any_replaced_cell_reads_or_is_a_plan_error(graph: StepGraph, data: st.DataObject) -> None:
    """Whatever a cell is replaced by, reading gives a graph or a PlanError."""
    payload = json.loads(graph.to_json())
    table = data.draw(st.sampled_from([t for t in ("ops", "storages", "values", "saves") if payload[t]]))
    row = data.draw(st.sampled_from(payload[table]))
    junk = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3))
    row[data.draw(st.integers(0, len(row) - 1))] = data.draw(st.one_of(junk, st.lists(junk, max_size=3)))
    with contextlib.suppress(PlanError):
        StepGraph.from_json(json.dumps(payload))


@given(graph=step_graphs(), cut=st.floats(0, 1))
def test_truncated_file_is_a_plan_error(graph: StepGraph, cut: float) -> None:
    """A file whose end is missing is refused."""
    text = graph.to_json()
    with pytest.raises(PlanError):
        StepGraph.from_json(text[: int(cut * (len(text) - 1))])


@given(step_graphs())
def test_file_from_before_workspaces_is_read(graph: StepGraph) -> None:
    """Its rows of ops are shorter; what they need beside inputs and outputs is not known, so 0."""
    payload = json.loads(graph.to_json())
    for row in payload["ops"]:
        del row[-2:]  # neither they nor what a replay leaves out
    ops = tuple(dataclasses.replace(op, workspace_bytes=0) for op in graph.ops)
    assert StepGraph.from_json(json.dumps(payload)) == dataclasses.replace(graph, ops=ops)


@given(graph=step_graphs(), seconds=st.floats(0, 1e6), workspace=st.integers(0, 1 << 40))
def test_digest_ignores_what_is_measured(graph: StepGraph, seconds: float, workspace: int) -> None:
    """Two runs of one model have one digest, however long their ops took and whatever workspace they used."""
    ops = tuple(dataclasses.replace(op, seconds=seconds, workspace_bytes=workspace) for op in graph.ops)
    assert dataclasses.replace(graph, ops=ops).digest() == graph.digest()


def test_digest_depends_on_structure() -> None:
    """Another op, size, wiring or save is another digest."""

    def two(name: str = "aten.sin.default", size: int = 40, wire: int = 0, saved: int = 1) -> str:
        b = GraphBuilder()
        values = [b.given(8)]
        values += b.op((0,), (size,), name=name)
        values += b.op((values[wire],), (size,))
        b.pack(values[saved])
        return b.build().digest()

    digests = {two(), two(name="aten.cos.default"), two(size=41), two(wire=1), two(saved=2)}
    assert len(digests) == 5


def test_op_at_gives_the_next_op() -> None:
    """A tick between ops belongs to the op that follows it; past the last op there is none."""
    graph = chain(40, 50)
    for tick in range(graph.num_ticks + 1):
        assert graph.op_at(tick) == next((op for op in graph.ops if op.tick >= tick), None)


def test_persistent_bytes_count_what_was_there_before() -> None:
    """Weights and untouched state count, what the step makes does not."""
    graph = dataclasses.replace(chain(40, weight_bytes=100), extra_bytes=7)
    assert graph.persistent_bytes == 107
    assert graph.seconds == 2.0


def test_storages_of_the_modules_that_match() -> None:
    """Patterns are those of file names, with the case that they have; one that matches nothing finds nothing."""
    b = GraphBuilder()
    value = b.given(1)
    saves = []
    for module in ("stem", "body.0.conv", "body.1.conv", "Body"):
        (value,) = b.op((value,), (10,), module=module)
        saves.append(b.pack(value, module=module))
    b.backward()
    for save in reversed(saves):
        b.unpack(save)
        b.release(save)
    graph = b.build()
    stem, first, second, other = (graph.values[save.value].storage for save in graph.saves)
    assert graph.storages_saved_in(["body.*"]) == {first, second}
    assert graph.storages_saved_in(pattern for pattern in ("stem", "*.1.*")) == {stem, second}
    assert graph.storages_saved_in(["B*"]) == {other}
    assert graph.storages_saved_in(["*"]) == {stem, first, second, other}
    assert graph.storages_saved_in(["conv"]) == graph.storages_saved_in([]) == frozenset()


def test_allocated_storages_are_whole_blocks() -> None:
    """Sizes are rounded up; the structure is the same, so a plan for the one is a plan for the other."""
    graph = dataclasses.replace(chain(700, 1024, 10), block_bytes=512)
    allocated = graph.allocated()
    assert [s.num_bytes for s in allocated.storages] == [-(-s.num_bytes // 512) * 512 for s in graph.storages]
    assert allocated.block_bytes == 1
    assert allocated.digest() == graph.digest()
    assert allocated.allocated() is allocated
    assert allocated.digest() != chain(700, 1024, 10).digest()


def test_block_size_is_kept_in_files() -> None:
    """A file written before there was one has blocks of a byte."""
    graph = dataclasses.replace(chain(700, 1024, 10), block_bytes=512)
    assert StepGraph.from_json(graph.to_json()) == graph
    data = json.loads(graph.to_json())
    del data["block_bytes"]
    assert StepGraph.from_json(json.dumps(data)) == chain(700, 1024, 10)
