"""What to do with every saved storage of a step; made by planning, executed by the runtime."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from lightning_offload.errors import PlanError
from lightning_offload.graph import codec
from lightning_offload.graph.step_graph import StepGraph

Action = Literal["keep", "swap", "recompute"]
Tier = Literal["host", "disk"]

AT_PACK = -1
"""``release_op`` of a swap whose device copy is released at once, when it is packed."""
ON_DEMAND = -1
"""``prefetch_unpack`` of a swap that is brought back when it is first needed."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What happens to one saved storage; storages without a decision are kept.

    Attributes:
        storage: Index in the graph.
        action: Keep, swap or recompute.
        tier: Where a swap goes.
        release_op: Op before which the device copy is released, waiting for its copy out; :data:`AT_PACK`.
        prefetch_unpack: Ordinal of the unpack (of any tensor) at which the copy back is issued;
            :data:`ON_DEMAND`.
        memo: Whether a value replayed on the way to another stays resident for its own later unpack.
    """

    storage: int
    action: Action
    tier: Tier = "host"
    release_op: int = AT_PACK
    prefetch_unpack: int = ON_DEMAND
    memo: bool = True


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """A plan for one step graph.

    Attributes:
        graph_digest: :meth:`StepGraph.digest` of the graph it was made for.
        policy: Who made it.
        budget_bytes: The budget it was made for, None without one.
        decisions: At most one a storage. Copies back that are issued at the same unpack go in their order.
        predicted_peak_bytes: Peak of live device bytes under the plan.
        predicted_step_seconds: Step time under the plan.
        plain_peak_bytes: Predicted peak with everything kept.
        plain_step_seconds: Predicted step time with everything kept.
        floor_bytes: Smallest feasible budget.
        floor_op: The op whose working set sets the floor.
        bound_seconds: Lower bound on the step time of any plan within the budget.
        predicted_stall_seconds: The part of the step time in which compute waits for copies.
        predicted_host_bytes: Peak of swapped bytes on the host at once, in storages' own sizes.
        predicted_disk_bytes: The same for the disk.
    """

    graph_digest: str
    policy: str
    budget_bytes: int | None
    decisions: tuple[Decision, ...]
    predicted_peak_bytes: int
    predicted_step_seconds: float
    plain_peak_bytes: int
    plain_step_seconds: float
    floor_bytes: int
    floor_op: str
    bound_seconds: float
    predicted_stall_seconds: float = dataclasses.field(default=0.0, metadata=codec.ADDED)
    predicted_host_bytes: int = dataclasses.field(default=0, metadata=codec.ADDED)
    predicted_disk_bytes: int = dataclasses.field(default=0, metadata=codec.ADDED)

    def bytes_of(self, graph: StepGraph, action: Action) -> int:
        """Bytes of saved storages (persistent ones aside) under an action."""
        actions = {decision.storage: decision.action for decision in self.decisions}
        saved = {graph.values[save.value].storage for save in graph.saves}
        chosen = (graph.storages[s] for s in saved if actions.get(s, "keep") == action)
        return sum(storage.num_bytes for storage in chosen if not storage.is_persistent)

    def to_json(self) -> str:
        """Write the plan as JSON."""
        payload: dict[str, Any] = codec.encode(self)
        payload["decisions"] = codec.encode_rows(self.decisions)
        return codec.dumps("memory_plan", payload)

    @classmethod
    def from_json(cls, text: str) -> MemoryPlan:
        """Read a plan; :meth:`check` it against its graph before use.

        Raises:
            PlanError: Not a memory plan, another schema version, or a field of the wrong type.
        """
        data = codec.loads("memory_plan", text)
        data["decisions"] = codec.decode_rows(Decision, data.get("decisions"), where="decisions")
        return codec.decode(cls, data, where="memory_plan")

    def check(self, graph: StepGraph) -> None:
        """Check that the plan is one for this graph.

        Raises:
            PlanError: Made for another graph, or a decision points outside it.
        """
        if self.graph_digest != graph.digest():
            raise PlanError(
                f"the plan was made for another model or other inputs (graph {self.graph_digest}, "
                f"here {graph.digest()}); remove plan= or record the step again"
            )
        num_unpacks = sum(len(save.unpack_ticks) for save in graph.saves)
        seen: set[int] = set()
        for i, decision in enumerate(self.decisions):
            ok = 0 <= decision.storage < len(graph.storages) and decision.storage not in seen
            ok = ok and AT_PACK <= decision.release_op <= len(graph.ops)
            if not ok or not ON_DEMAND <= decision.prefetch_unpack < num_unpacks:
                raise PlanError(f"decisions[{i}] points outside the graph or repeats a storage: {decision}")
            seen.add(decision.storage)
