"""Durations measured later replace those of the recording, for the same ops only."""

from __future__ import annotations

import dataclasses

import torch

from lightning_offload.capture.timing import OpTimes, retime
from lightning_offload.tensors.op_facts import facts_of
from tests.graph.building import chain

_FACTS = facts_of(torch.ops.aten.add.Tensor)


def times(names: list[str], seconds: list[float]) -> OpTimes:
    """Times as observed."""
    found = OpTimes()
    for name, duration in zip(names, seconds, strict=True):
        found.on_op(dataclasses.replace(_FACTS, name=name), (), {}, None, duration)
    return found


def test_times_are_replaced_op_by_op() -> None:
    """Each op takes its new duration if that is the smaller one; nothing else changes."""
    graph = chain(40, 50)
    timed = retime(graph, times([op.name for op in graph.ops], [0.5, 0.25, 1.0, 2.0]))
    assert [op.seconds for op in timed.ops] == [0.5, 0.25, 1.0, 1.0]
    assert timed.digest() == graph.digest()
    assert dataclasses.replace(timed, ops=graph.ops) == graph


def test_other_ops_change_nothing() -> None:
    """A step that ran other ops, or another number of them, says nothing about this graph."""
    graph = chain(40, 50)
    names = [op.name for op in graph.ops]
    assert retime(graph, times(names[:-1], [1.0] * 3)) is graph
    assert retime(graph, times(["aten.sin.default", *names[1:]], [9.0] * 4)) is graph
