"""What sets a step's floor, of what it consists, and what would lower it."""

from __future__ import annotations

import dataclasses

from hypothesis import given, settings

from lightning_offload.graph import StepGraph
from lightning_offload.planning.findings import ANY_DEVICE, explain_floor, one_by_one
from lightning_offload.planning.logits import find_logits, in_chunks
from lightning_offload.planning.planner import plan
from lightning_offload.planning.problem import Problem
from lightning_offload.planning.request import PlanRequest
from tests.graph.building import DEVICE, GraphBuilder, chain, step_graphs
from tests.planning.test_logits import LOGITS_BYTES, floor_of, head
from tests.shares import examples


def updated() -> StepGraph:
    """A step that ends with an update of three parameters at once, by two foreach ops with temporaries."""
    b = GraphBuilder()
    parameters = tuple(b.given(size) for size in (100, 200, 300))
    b.backward()
    gradients = b.op(parameters, (100, 200, 300))
    squares = b.op(gradients, (100, 200, 300), name="aten._foreach_mul.List")
    roots = b.op(squares, (100, 200, 300), name="aten._foreach_sqrt.default")
    b.drop(*squares)
    b.op((*parameters, *roots), writes=parameters, name="aten._foreach_addcdiv_.Scalar")
    b.drop(*roots)
    b.op()
    return b.build()


def test_logits() -> None:
    """The op and the storages at the peak, and the loss in chunks with its floor, its op and its gain."""
    graph = head()
    found = explain_floor(graph)
    assert found.floor_bytes == floor_of(graph)
    assert found.op == "aten._log_softmax_backward_data.default (backward)"
    assert [each.num_bytes for each in found.live[:3]] == [LOGITS_BYTES] * 3
    assert [each.op for each in found.live[:3]] == [
        "aten._log_softmax.default", "aten.nll_loss_backward.default", "aten._log_softmax_backward_data.default",
    ]  # fmt: skip
    assert [each.phase for each in found.live[:3]] == ["forward", "backward", "backward"]
    assert [remedy.kind for remedy in found.remedies] == ["chunked-loss", "smaller-batch"]
    chunked, smaller = found.remedies
    (logits,) = find_logits(graph)
    assert chunked.num_chunks == 64
    assert chunked.floor_bytes == floor_of(in_chunks(graph, logits, 64))
    assert chunked.gain_bytes == found.floor_bytes - chunked.floor_bytes
    assert chunked.advice.startswith("the logits of `head`: train with chunked_loss=True, or compute the loss by light")
    assert (chunked.overhead, smaller.floor_bytes, smaller.gain_bytes) == (None, None, None)


def test_overhead_within_a_budget() -> None:
    """On a known device the step in chunks is planned within the same budget; not below its floor."""
    graph = head()
    (logits,) = find_logits(graph)
    budget = floor_of(graph)
    (remedy, _) = explain_floor(graph, DEVICE, budget_bytes=budget).remedies
    made = plan(in_chunks(graph, logits, 64), DEVICE, budget)
    assert remedy.overhead == made.predicted_step_seconds / made.plain_step_seconds - 1 == 0.0
    assert explain_floor(graph, DEVICE, budget_bytes=1).remedies[0].overhead is None
    assert explain_floor(graph, None, budget_bytes=budget).remedies[0].overhead is None


def test_foreach_optimizer() -> None:
    """An update within the step that sets the floor: of each op's temporaries the largest, one by one."""
    found = explain_floor(updated())
    assert found.op == "aten._foreach_sqrt.default (backward)"
    assert found.floor_bytes == 4 * 600
    remedy = found.remedies[0]
    assert remedy.kind == "single-tensor-optimizer"
    assert remedy.floor_bytes == 2 * 600 + 2 * 300 == floor_of(one_by_one(updated()))
    assert remedy.gain_bytes == 600
    assert "foreach=False, or fused=True" in remedy.advice


def test_foreach_results_that_stay() -> None:
    """What outlives the step is no temporary."""
    b = GraphBuilder()
    b.op((b.given(10),), (10, 20), name="aten._foreach_mul.Scalar")
    assert one_by_one(b.build()) == b.build()


def test_half_the_batch() -> None:
    """A step recorded at half the batch gives the floor of that; the most effective remedy comes first."""
    found = explain_floor(chain(1000, 800), smaller_batch=chain(500, 400))
    (remedy,) = found.remedies
    assert (remedy.kind, remedy.floor_bytes) == ("smaller-batch", floor_of(chain(500, 400)))
    assert remedy.gain_bytes == found.floor_bytes - floor_of(chain(500, 400)) > 0
    assert remedy.advice.startswith("halve the batch, or the size of the micro-batches")
    tiny = chain(1)
    assert [each.kind for each in explain_floor(head(), smaller_batch=tiny).remedies] == [
        "smaller-batch",
        "chunked-loss",
    ]


@settings(max_examples=examples(100), deadline=None)
@given(graph=step_graphs(unit=1000))
def test_what_is_there_adds_up(graph: StepGraph) -> None:
    """State, storages and the rest are the floor; the rest is not negative, and nothing without replays and others."""
    found = explain_floor(graph)
    request = PlanRequest(Problem(graph), ANY_DEVICE, None)
    assert found.floor_bytes == request.floor.peak_bytes
    assert found.persistent_bytes + sum(each.num_bytes for each in found.live) + found.other_bytes == found.floor_bytes
    assert found.other_bytes >= 0
    if "recompute" not in request.floor_actions.values() and not graph.gradient_bytes + graph.old_gradient_bytes:
        op = graph.op_at(request.floor.peak_tick)
        assert found.other_bytes <= (op.workspace_bytes if op is not None else 0)


def test_an_empty_step() -> None:
    """A step that only has a state: that sets the floor."""
    found = explain_floor(dataclasses.replace(GraphBuilder().build(), extra_bytes=7))
    assert (found.floor_bytes, found.op, found.live) == (7, "the state that is there before the step", ())


def test_what_takes_long_is_told() -> None:
    """Planning in chunks is announced."""
    told: list[str] = []
    explain_floor(head(), DEVICE, budget_bytes=floor_of(head()), tell=told.append)
    assert told == ["planning the step with 64 chunks"]
