"""The logits of a step, recognised by structure, and the floor with a loss in chunks, against recorded ones."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from examples.models import language
from examples.models.registry import default_dtype
from lightning_offload.errors import BudgetInfeasibleError
from lightning_offload.graph import StepGraph
from lightning_offload.planning.findings import ANY_DEVICE
from lightning_offload.planning.logits import Logits, chunked_floor, find_logits, in_chunks
from lightning_offload.planning.planner import plan
from lightning_offload.planning.problem import Problem
from lightning_offload.planning.request import PlanRequest
from lightning_offload.plugins.fake import record_fake
from tests.graph.building import GraphBuilder

ROWS, CLASSES, FEATURES = 64, 1024, 2
LOGITS_BYTES = 4 * ROWS * CLASSES


def head(*, between: str = "", scored: bool = True, frozen: bool = False, softcap: bool = False) -> StepGraph:
    """A step that is nothing but a vocabulary's product and its loss.

    Args:
        between: An op between product and softmax.
        scored: Whether nll_loss reads the softmax.
        frozen: Whether the product is of two results of the step.
        softcap: Whether another op makes something as large of the logits.
    """
    b = GraphBuilder()
    given = b.given(4 * FEATURES * CLASSES)
    weight = b.make(4 * FEATURES * CLASSES, given) if frozen else given
    targets = b.given(8 * ROWS)
    hidden = b.make(4 * ROWS * FEATURES)
    (logits,) = b.op((hidden, weight), (LOGITS_BYTES,), name="aten.mm.default", module="head")
    read = b.op((logits,), (LOGITS_BYTES,), name=between)[0] if between else logits
    if softcap:
        b.drop(b.op((logits,), (LOGITS_BYTES,), name="aten.tanh.default")[0])
    (scores,) = b.op((read,), (LOGITS_BYTES,), name="aten._log_softmax.default")
    save = b.pack(scores)
    b.drop(logits, read)
    b.drop(b.op((scores, targets), (4,), name="aten.nll_loss_forward.default" if scored else "aten.sum.default")[0])
    b.drop(scores)
    b.backward()
    b.unpack(save)
    (outer,) = b.op(
        (scores, targets), (LOGITS_BYTES,), name="aten.nll_loss_backward.default" if scored else "aten.mul.Tensor"
    )
    (inner,) = b.op((outer, scores), (LOGITS_BYTES,), name="aten._log_softmax_backward_data.default")
    b.drop(outer)
    b.release(save)
    b.op((inner, hidden), (4 * FEATURES * CLASSES,), name="aten.mm.default")
    b.op((inner, weight), (4 * ROWS * FEATURES,), name="aten.mm.default")
    b.drop(inner)
    return b.build()


def floor_of(graph: StepGraph) -> int:
    return PlanRequest(Problem(graph), ANY_DEVICE, None).floor.peak_bytes


def test_logits_are_found() -> None:
    """With all that is as large as they are, and what chunks accumulate instead."""
    graph = head()
    (found,) = find_logits(graph)
    assert found == Logits(
        module="head",
        num_bytes=LOGITS_BYTES,
        storages=frozenset(i for i, s in enumerate(graph.storages) if s.num_bytes == LOGITS_BYTES),
        cut_bytes=2 * LOGITS_BYTES,
        first_tick=1,
        product_tick=8,
        last_tick=9,
        accumulated_bytes=4 * FEATURES * (CLASSES + ROWS),
        part_bytes=0,
    )
    assert found.name == "the logits of `head`"


def test_chunks_take_a_share() -> None:
    """The floor with k chunks: the state, the hidden states, what is accumulated, and a k-th of twice the logits."""
    graph = head()
    (found,) = find_logits(graph)
    state = 4 * FEATURES * CLASSES + 8 * ROWS + 4 * ROWS * FEATURES
    assert floor_of(graph) == state + 3 * LOGITS_BYTES
    for num_chunks in (2, 4, 5):
        cut = in_chunks(graph, found, num_chunks)
        assert cut.digest() != graph.digest()
        # forward's peak also holds the loss, 4 bytes
        assert floor_of(cut) == state + found.accumulated_bytes + -(-2 * LOGITS_BYTES // num_chunks) + 4


def test_more_chunks_until_something_else_sets_the_floor() -> None:
    """Eight chunks or more; never more than help, and none where logits do not set the floor."""
    request = PlanRequest(Problem(head()), ANY_DEVICE, None)
    found = chunked_floor(request.problem, ANY_DEVICE, request.lowest)
    assert found is not None
    assert found.num_chunks == 64  # then the two gradients and what they were accumulated in are as large
    assert found.floor.timeline.peak_bytes < request.floor.peak_bytes
    b = GraphBuilder()
    b.drop(b.make(10))
    other = PlanRequest(Problem(b.build()), ANY_DEVICE, None)
    assert chunked_floor(other.problem, ANY_DEVICE, other.lowest) is None


@pytest.mark.parametrize("between", ["aten._to_copy.default", "aten.clone.default"])
def test_copies_on_the_way(between: str) -> None:
    """Logits may be cast or copied before the softmax."""
    graph = head(between=between)
    (found,) = find_logits(graph)
    assert len(found.storages) == 5


@pytest.mark.parametrize(
    "graph",
    [head(scored=False), head(frozen=True), head(softcap=True), head(between="aten.tanh.default")],
    ids=["no-loss", "no-parameter", "read-elsewhere", "softcap"],
)
def test_what_a_chunked_loss_cannot_do(graph: StepGraph) -> None:
    """A softmax without nll_loss, a product without a parameter, and logits that something else reads or changes."""
    assert find_logits(graph) == ()


def test_the_error_says_what_would_help() -> None:
    """A budget below the floor names the logits and what the loss in chunks is predicted to need."""
    with pytest.raises(BudgetInfeasibleError) as caught:
        plan(head(), ANY_DEVICE, LOGITS_BYTES)
    assert (
        "or lower the batch size; the logits of `head` set it: chunked_loss=True, or "
        "lightning_offload.chunked_linear_cross_entropy, with 64 chunks is predicted to need" in str(caught.value)
    )
    with pytest.raises(BudgetInfeasibleError) as caught:
        plan(head(softcap=True), ANY_DEVICE, LOGITS_BYTES)
    assert "chunk" not in str(caught.value)


Loss = Callable[[nn.Module, Tensor], Tensor]


def own_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """The loss that the library computes."""
    loss: Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss


def plain_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(input_ids=tokens).logits.flatten(0, 1), tokens.roll(-1, 1).flatten())


def recorded(loss: Loss, dtype: torch.dtype, autocast: torch.dtype | None = None) -> StepGraph:
    """A step of a small GPT-2 with the whole vocabulary, recorded on FakeTensors."""

    def build() -> tuple[nn.Module, Callable[[], None]]:
        with default_dtype(dtype):
            model = language.gpt2(attention_dropout=0.0, layers=2, width=256, heads=4).train()
        tokens = torch.randint(0, 50_257, (4, 512))

        def step() -> None:
            with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
                found = loss(model, tokens)
            found.backward()  # type: ignore[no-untyped-call]

        return model, step

    return record_fake(build).graph


@pytest.mark.parametrize(
    ("loss", "dtype", "autocast"),
    [
        (plain_loss, torch.float32, None),
        (own_loss, torch.float32, None),
        (plain_loss, torch.bfloat16, None),
        (own_loss, torch.float32, torch.bfloat16),
    ],
)
def test_predictions_are_those_of_recorded_steps(loss: Loss, dtype: torch.dtype, autocast: torch.dtype | None) -> None:
    """The floor of a step with a loss in chunks, predicted from the step without: within 2% of a recording of it."""
    plainly = recorded(loss, dtype, autocast)
    (logits,) = find_logits(plainly)
    assert logits.module == "lm_head"
    for num_chunks in (2, 8):
        chunks = recorded(functools.partial(language.chunked_loss, num_chunks=num_chunks), dtype, autocast)
        predicted, true = floor_of(in_chunks(plainly, logits, num_chunks)), floor_of(chunks)
        assert predicted == pytest.approx(true, rel=0.02)
        assert true < floor_of(plainly)
