"""Plans in checkpoints: recorded graphs and their plans as JSON-able data, and back."""

from __future__ import annotations

from typing import Any

from lightning_offload.errors import PlanError
from lightning_offload.graph.memory_plan import MemoryPlan
from lightning_offload.graph.step_graph import StepGraph
from lightning_offload.plugins.lifecycle import StepKind

_SCHEMA = 1


def dump_kinds(kinds: dict[str, StepKind]) -> dict[str, Any]:
    """Write the kinds of step that have a plan."""
    return {
        "schema": _SCHEMA,
        "plans": [
            {"signature": signature, "graph": kind.graph.to_json(), "plan": kind.plan.to_json()}
            for signature, kind in kinds.items()
            if kind.graph is not None and kind.plan is not None
        ],
    }


def load_kinds(state: Any, policy: str, budget_bytes: int | None) -> dict[str, StepKind]:
    """Read kinds of step; those planned for another policy or budget are planned anew.

    Raises:
        PlanError: The state is malformed.
    """
    if not isinstance(state, dict) or state.get("schema") != _SCHEMA:
        raise PlanError(f"not a state of this version of the memory plugin: {str(state)[:80]!r}")
    try:
        rows = [(row["signature"], row["graph"], row["plan"]) for row in state["plans"]]
    except (KeyError, TypeError) as error:
        raise PlanError(f"the state of the memory plugin is malformed: {error!r}") from None
    if not all(isinstance(text, str) for row in rows for text in row):
        raise PlanError("the state of the memory plugin is malformed: signatures, graphs and plans must be text")
    kinds = {}
    for signature, graph_text, plan_text in rows:
        graph, plan = StepGraph.from_json(graph_text), MemoryPlan.from_json(plan_text)
        fits = plan.policy == policy and plan.budget_bytes == budget_bytes
        kinds[signature] = StepKind.restored(graph, plan if fits else None)
    return kinds
