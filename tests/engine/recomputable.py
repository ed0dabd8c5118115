"""How much of what a step saves may be recomputed, in a process that knows no custom op yet."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lightning_offload import MemoryPlugin
from lightning_offload.planning.problem import Problem
from lightning_offload.tensors import custom_ops


@pytest.fixture(autouse=True)
def nothing_known() -> Iterator[None]:
    """Each test is a process of its own."""
    custom_ops.forget()
    yield
    custom_ops.forget()


def recomputable_share(memory: MemoryPlugin) -> float:
    """Which part, in bytes, of what is saved and dies with the step may be recomputed by the plugin's last plan."""
    planned = memory.report().planned
    assert planned is not None
    graph = planned.graph
    saved = {graph.values[save.value].storage for save in graph.saves}
    made = {storage for storage in saved if not graph.storages[storage].is_persistent}
    candidates = Problem(graph, smallest=1).candidates
    may = sum(graph.storages[s].num_bytes for s in made if s in candidates and candidates[s].can_recompute)
    return may / sum(graph.storages[s].num_bytes for s in made)
