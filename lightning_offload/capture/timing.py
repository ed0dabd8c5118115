"""Measures the ops and the stalls of a step that runs under a plan."""

from __future__ import annotations

import dataclasses
from typing import Any

from typing_extensions import override

from lightning_offload.graph.step_graph import StepGraph
from lightning_offload.tensors.observer import StepObserver
from lightning_offload.tensors.op_facts import OpFacts


class OpTimes(StepObserver):
    """Durations of the ops of one step, in order.

    Attributes:
        seconds: One entry an op.
        names: Its overload.
    """

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.names: list[str] = []

    @override
    def on_op(self, facts: OpFacts, args: Any, kwargs: Any, out: Any, seconds: float) -> None:
        self.seconds.append(seconds)
        self.names.append(facts.name)


def retime(graph: StepGraph, times: OpTimes) -> StepGraph:
    """The graph with the durations measured in a later step; unchanged if that step ran other ops."""
    if times.names != [op.name for op in graph.ops]:
        return graph
    # The smaller of two measurements: what a busy machine adds is no property of the op.
    ops = (
        dataclasses.replace(op, seconds=min(seconds, op.seconds))
        for op, seconds in zip(graph.ops, times.seconds, strict=True)
    )
    return dataclasses.replace(graph, ops=tuple(ops))
