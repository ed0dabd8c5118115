"""Runs steps under plans written by hand: record once, decide per storage, run again."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from lightning_offload.capture.live import LiveBytes
from lightning_offload.graph import Decision, MemoryPlan, StepGraph
from lightning_offload.graph.memory_plan import Action
from lightning_offload.graph.step_graph import last_values
from lightning_offload.planning.problem import Problem
from lightning_offload.runtime.executor import StepExecutor
from lightning_offload.runtime.hooks import executing
from lightning_offload.runtime.host_pool import HostPool
from lightning_offload.runtime.lanes import CopyLanes
from lightning_offload.runtime.program import Program, compile_plan
from lightning_offload.runtime.tiers import Tiers
from lightning_offload.runtime.verifier import Verifier
from lightning_offload.tensors.observer import StepObserver
from tests.capture.recording import record
from tests.runtime.inline import inline_lanes

CPU = torch.device("cpu")

Step = Callable[[], Tensor]
"""Builds a loss from leaves made outside."""


def plan_of(graph: StepGraph, *decisions: Decision) -> MemoryPlan:
    """A plan with these decisions and no predictions."""
    return MemoryPlan(
        graph_digest=graph.digest(), policy="hand", budget_bytes=None, decisions=decisions,
        predicted_peak_bytes=0, predicted_step_seconds=0.0, plain_peak_bytes=0, plain_step_seconds=0.0,
        floor_bytes=0, floor_op="", bound_seconds=0.0,
    )  # fmt: skip


def saved_storages(graph: StepGraph) -> list[int]:
    """Storages made in the step and saved in their last value, in order of their first pack."""
    last = last_values(graph)
    found = dict.fromkeys(graph.values[save.value].storage for save in graph.saves if not save.must_keep)
    values = {save.value for save in graph.saves}
    return [s for s in found if not graph.storages[s].is_persistent and last[s] in values]


def compiled(step: Step, action: Action, *, only: Callable[[int], bool] = lambda _: True) -> Program:
    """Record a step with its backward; treat all saved storages (or those at some places) one way.

    What is to be recomputed and cannot be is swapped.
    """
    graph = record(lambda: step().backward())
    problem, last = Problem(graph), last_values(graph)
    chosen = [s for place, s in enumerate(saved_storages(graph)) if only(place)]
    actions: dict[int, Action] = dict.fromkeys(chosen, action)
    for s in chosen:
        if action == "recompute" and not problem.can_replay(last[s]):
            actions[s] = "swap"
    return compile_plan(graph, plan_of(graph, *(Decision(storage=s, action=a) for s, a in actions.items())))


@dataclasses.dataclass
class Ran:
    """What is left of a step."""

    executor: StepExecutor
    live: LiveBytes
    verifier: Verifier | None
    pool: HostPool


def executor_for(
    program: Program | None,
    *,
    lanes: CopyLanes | None = None,
    pool: HostPool | None = None,
    observer: StepObserver | None = None,
    verify: bool = False,
) -> StepExecutor:
    """An executor on the CPU."""
    tiers = Tiers(lanes or inline_lanes(), pool)
    return StepExecutor(
        device=CPU, tiers=tiers, program=program, observer=observer,
        verifier=Verifier(tiers) if verify else None,
    )  # fmt: skip


@contextlib.contextmanager
def under(program: Program | None, *, verify: bool = False, lanes: CopyLanes | None = None) -> Iterator[Ran]:
    """Run what is inside as a step under a program."""
    pool, live = HostPool(), LiveBytes(CPU)
    tiers = Tiers(lanes or inline_lanes(), pool)
    verifier = Verifier(tiers) if verify else None
    executor = StepExecutor(
        device=CPU, tiers=tiers, program=program, observer=live, verifier=verifier
    )  # fmt: skip
    with executing(executor):
        yield Ran(executor, live, verifier, pool)


def gradients(leaves: tuple[Tensor, ...]) -> list[bytes]:
    """The gradients of leaves as bytes; they are set to None."""
    found = [bytes(leaf.grad.contiguous().view(torch.uint8).numpy().tobytes()) for leaf in leaves]  # type: ignore[union-attr]
    for leaf in leaves:
        leaf.grad = None
    return found


def plain(step: Step, *leaves: Tensor, seed: int = 3) -> list[bytes]:
    """Gradients of a step without us, then the generator's state."""
    torch.manual_seed(seed)
    step().backward()
    return [*gradients(leaves), bytes(torch.get_rng_state().numpy().tobytes())]


def planned(step: Step, *leaves: Tensor, program: Program | None, seed: int = 3, **how: Any) -> tuple[list[bytes], Ran]:
    """The same under a program."""
    torch.manual_seed(seed)
    with under(program, **how) as ran:
        step().backward()
    return [*gradients(leaves), bytes(torch.get_rng_state().numpy().tobytes())], ran
