"""Checkmate, DTR and the chain program of POFO: what each takes first, and what each can meet."""

from __future__ import annotations

import dataclasses

import pytest

from lightning_offload.errors import BudgetInfeasibleError
from lightning_offload.graph import StepGraph
from lightning_offload.planning.planner import plan
from lightning_offload.planning.policies.checkmate import by_fraction
from lightning_offload.planning.policies.dtr import run
from lightning_offload.planning.policies.layers import layers_of
from lightning_offload.planning.policies.pofo import blocks_of, choose
from lightning_offload.planning.problem import Problem
from lightning_offload.planning.request import PlanRequest
from tests.graph.building import DEVICE, chain
from tests.planning.policies.nets import Net, actions_of

FAST = dataclasses.replace(DEVICE, d2h_bytes_per_second=1e6, h2d_bytes_per_second=1e6)
REMATERIALIZING = ("checkmate", "dtr")


def mixed() -> StepGraph:
    """Two cheap results among dear ones, all of a size."""
    graph = chain(*[100] * 10)
    seconds = [0.01 if i in (3, 6) else 5.0 for i in range(len(graph.ops))]
    return dataclasses.replace(
        graph, ops=tuple(dataclasses.replace(op, seconds=s) for op, s in zip(graph.ops, seconds, strict=True))
    )


@pytest.mark.parametrize("policy", [*REMATERIALIZING, "pofo"])
def test_nothing_is_done_without_pressure(policy: str) -> None:
    """Without a budget, and with one that the plain step meets."""
    graph = mixed()
    plain = plan(graph, DEVICE, None, policy=policy)
    assert plain.decisions == ()
    assert plan(graph, DEVICE, plain.plain_peak_bytes, policy=policy).decisions == ()


@pytest.mark.parametrize("policy", REMATERIALIZING)
def test_nothing_is_swapped_and_what_is_cheap_goes_first(policy: str) -> None:
    """With links however fast; a budget that lacks one result costs the cheap one."""
    graph = mixed()
    peak = plan(graph, FAST, None).plain_peak_bytes
    found = plan(graph, FAST, peak - 100, policy=policy)
    assert actions_of(found)["swap"] == []
    assert found.predicted_step_seconds == pytest.approx(found.plain_step_seconds + 0.01, abs=0.05)


@pytest.mark.parametrize("policy", [*REMATERIALIZING, "pofo"])
def test_the_floor_in_the_error_is_met(policy: str) -> None:
    """A budget that a policy cannot meet names one that it can."""
    graph = mixed()
    with pytest.raises(BudgetInfeasibleError) as caught:
        plan(graph, DEVICE, 1, policy=policy)
    found = plan(graph, DEVICE, caught.value.floor_bytes, policy=policy)
    assert found.predicted_peak_bytes <= caught.value.floor_bytes


def test_dtr_evicts_what_was_not_read_for_longest() -> None:
    """Of results alike in size and cost the first one made is the stalest."""
    graph = chain(*[100] * 8)
    request = PlanRequest(Problem(graph), DEVICE, None)
    tried = run(request, layers_of(request.problem), request.plain.peak_bytes - 1)
    assert tried.actions == {1: "recompute"}


def test_dtr_makes_anew_what_it_evicts_again() -> None:
    """Under a limit that holds a third of a chain, results that were made again leave once more."""
    graph = chain(*[100] * 12)
    request = PlanRequest(Problem(graph), DEVICE, None)
    tried = run(request, layers_of(request.problem), request.plain.peak_bytes - 800)
    assert tried.no_memo
    assert tried.no_memo <= set(tried.actions)


def test_checkmate_orders_by_what_the_relaxation_recomputes() -> None:
    """The cheap results come first, and everything that can be recomputed is in the order."""
    graph = mixed()
    peak = plan(graph, FAST, None).plain_peak_bytes
    order = by_fraction(PlanRequest(Problem(graph), FAST, None), peak - 150)
    assert {storage for storage, _ in order[:2]} == {4, 7}
    assert {action for _, action in order} == {"recompute"}
    assert len(order) == 10


def _blocks(num: int) -> StepGraph:
    net = Net()
    x = net.given(100)
    for i in range(num):
        x = net.layer("convolution", x, size=100, seconds=4.0, module=f"blocks.{i}.conv")
        x = net.layer("native_batch_norm", x, size=100, seconds=0.1, module=f"blocks.{i}.bn")
    return net.finish()


def test_pofo_chooses_per_block() -> None:
    """What the chain holds is within what it may hold, and a larger budget adds no more time."""
    request = PlanRequest(Problem(_blocks(6)), DEVICE, None)
    found = blocks_of(request)
    assert len(found) >= 6
    total = sum(block.saved_bytes for block in found)
    assert choose(found, 2 * total, (0.1, 1.0)) == [{}, {}]
    before = float("inf")
    for share in (0.3, 0.5, 0.7, 0.9):
        for actions in choose(found, int(share * total), (1.0,)):
            held = total - sum(request.problem.candidates[s].num_bytes for s in actions)
            assert held <= share * total
            seconds = sum(
                way.replay_seconds + way.copy_seconds
                for block in found
                for way in block.ways
                if way.actions and way.actions.items() <= actions.items()
            )
            assert seconds <= before
            before = seconds
    assert choose(found, 0, (1.0,)) == []
