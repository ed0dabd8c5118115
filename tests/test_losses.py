"""Cross-entropy over chunks of rows: torch's own values and gradients, in a share of the memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_offload import MemoryPlugin, UnsupportedError, chunked_linear_cross_entropy, losses
from tests.engine.live_tracker import LiveStorageTracker
from tests.one_thread import one_thread as one_thread

LARGEST_ERROR = {torch.float64: 1e-14, torch.float32: 5e-6, torch.bfloat16: 5e-2, torch.float16: 5e-3}
"""Of the largest entry: what was measured (1e-15, 4e-7, 1.3e-2, 1.5e-3) and some room."""

Loss = Callable[..., Tensor]


class Batch(NamedTuple):
    """What a loss is given, with leaves that want gradients."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    targets: Tensor
    class_weight: Tensor | None


def batch(
    rows: int = 48,
    classes: int = 50,
    features: int = 16,
    dtype: torch.dtype = torch.float32,
    *,
    has_bias: bool = True,
    has_class_weight: bool = False,
    ignored: int | None = None,
    seed: int = 0,
) -> Batch:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    targets = torch.randint(0, classes, (rows,), generator=generator)
    if ignored is not None:
        targets[torch.rand(rows, generator=generator) < 0.3] = ignored
    return Batch(
        hidden=draw(rows, features).requires_grad_(),
        weight=(0.3 * draw(classes, features)).requires_grad_(),
        bias=draw(classes).requires_grad_() if has_bias else None,
        targets=targets,
        class_weight=draw(classes).abs() if has_class_weight else None,
    )


def plain(given: Batch, num_chunks: int = 1, **how: Any) -> Tensor:
    """What torch does, which keeps all logits."""
    logits = F.linear(given.hidden, given.weight, given.bias)
    return F.cross_entropy(logits.flatten(0, -2), given.targets.flatten(), weight=given.class_weight, **how)


def chunked(given: Batch, num_chunks: int = 8, **how: Any) -> Tensor:
    return chunked_linear_cross_entropy(
        given.hidden, given.weight, given.targets, bias=given.bias, class_weight=given.class_weight,
        num_chunks=num_chunks, **how,
    )  # fmt: skip


def outcome(loss: Tensor, given: Batch, scale: float = 1.0) -> list[Tensor]:
    """A loss and its gradients."""
    leaves = [t for t in (given.hidden, given.weight, given.bias) if t is not None and t.requires_grad]
    return [loss.detach(), *torch.autograd.grad(loss * scale, leaves)]


def assert_close(found: list[Tensor], expected: list[Tensor], largest_error: float, least: float = 1e-3) -> None:
    """Largest errors are shares of the largest entry, which counts as `least` where it is smaller: terms cancel out."""
    for one, other in zip(found, expected, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        error = (one.double() - other.double()).abs().max()
        assert error <= largest_error * other.double().abs().max().clamp_min(least)


@settings(deadline=None, max_examples=150)
@given(
    rows=st.integers(1, 40),
    classes=st.integers(2, 60),
    features=st.integers(1, 20),
    dtype=st.sampled_from(list(LARGEST_ERROR)),
    has_bias=st.booleans(),
    has_class_weight=st.booleans(),
    ignored=st.sampled_from([None, -100, 1, 999]),
    reduction=st.sampled_from(["mean", "sum"]),
    smoothing=st.sampled_from([0.0, 0.1, 1.0]),
    num_chunks=st.integers(1, 50),
    seed=st.integers(0, 5),
)
def test_the_same_as_torch(
    rows: int,
    classes: int,
    features: int,
    dtype: torch.dtype,
    has_bias: bool,
    has_class_weight: bool,
    ignored: int | None,
    reduction: str,
    smoothing: float,
    num_chunks: int,
    seed: int,
) -> None:
    """Whatever the shapes, types and options: torch's loss and gradients, up to the order of sums."""
    here = batch(
        rows, classes, features, dtype, has_bias=has_bias, has_class_weight=has_class_weight, ignored=ignored, seed=seed
    )
    how: dict[str, Any] = {"reduction": reduction, "label_smoothing": smoothing}
    how["ignore_index"] = -100 if ignored is None else ignored
    found = outcome(chunked(here, num_chunks, **how), here)
    expected = outcome(plain(here, **how), here)
    if (here.targets == how["ignore_index"]).all():
        assert [bool(t.isnan().any()) for t in found] == [bool(t.isnan().any()) for t in expected]
        return
    counting = here.targets[here.targets != how["ignore_index"]]
    weights = here.class_weight[counting].double() if here.class_weight is not None else torch.ones(len(counting))
    least = weights.max() if reduction == "sum" else weights.max() / weights.sum()  # what one row may amount to
    assert_close(found, expected, LARGEST_ERROR[dtype], max(1e-3, float(least)))


@pytest.mark.parametrize("dtype", list(LARGEST_ERROR))
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("num_chunks", [2, 3, 8])
def test_chunks_change_no_bit_of_what_belongs_to_a_row(dtype: torch.dtype, smoothing: float, num_chunks: int) -> None:
    """Gradients of hidden states are bitwise those of one chunk; sums over rows differ by their order alone."""
    here = batch(192, 320, 64, dtype, has_class_weight=True, ignored=-100)
    how: dict[str, Any] = {"label_smoothing": smoothing, "reduction": "sum"}
    one = outcome(chunked(here, 1, **how), here)
    many = outcome(chunked(here, num_chunks, **how), here)
    assert torch.equal(many[1], one[1])
    assert_close(many, one, LARGEST_ERROR[dtype])


def test_chunks_change_no_bit_of_a_rows_loss() -> None:
    """The loss of one row, the others ignored, whatever chunk it is in."""
    here = batch(64, 320, 64)
    for row in range(0, 64, 7):
        targets = torch.full_like(here.targets, -100)
        targets[row] = here.targets[row]
        only = here._replace(targets=targets)
        assert torch.equal(chunked(only, 4), chunked(only, 1))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_runs_agree_bitwise(reduction: str) -> None:
    """Twice the same gives the same bits, and so does a second backward."""
    here = batch(ignored=-100)
    runs = [outcome(chunked(here, reduction=reduction), here) for _ in range(2)]
    assert all(map(torch.equal, *runs))
    loss = chunked(here, reduction=reduction)
    both = [torch.autograd.grad(loss, here.hidden, retain_graph=True)[0] for _ in range(2)]
    assert torch.equal(*both)


@pytest.mark.parametrize(("reduction", "smoothing"), [*itertools.product(["mean", "sum"], [0.0, 0.3])])
def test_numerical_gradients(reduction: str, smoothing: float) -> None:
    """Finite differences agree."""
    here = batch(7, 5, 3, torch.float64, has_class_weight=True, ignored=-100)

    def loss(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        given = here._replace(hidden=hidden, weight=weight, bias=bias)
        return chunked(given, 3, reduction=reduction, label_smoothing=smoothing)

    assert torch.autograd.gradcheck(loss, (here.hidden, here.weight, here.bias))


def test_leading_dimensions() -> None:
    """Hidden states of any shape, contiguous or not, with their targets."""
    here = batch(48)
    expected = outcome(chunked(here), here)
    hidden = here.hidden.detach().view(6, 8, 16).transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    shaped = here._replace(hidden=hidden, targets=here.targets.view(6, 8))
    found = outcome(chunked(shaped), shaped)
    found[1] = found[1].flatten(0, 1)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype) -> None:
    """Matrices are multiplied in autocast's type, the loss and the gradients of float32 leaves are in float32."""
    here = batch(has_class_weight=True, ignored=-100)
    with torch.autocast("cpu", dtype=dtype):
        found, expected = (outcome(loss(here), here) for loss in (chunked, plain))
    assert {t.dtype for t in found} == {torch.float32}
    assert_close(found, expected, LARGEST_ERROR[dtype])
    wide = batch(dtype=torch.float64)
    with torch.autocast("cpu", dtype=dtype):
        assert_close(outcome(chunked(wide), wide), outcome(plain(wide), wide), 1e-14)


def test_a_loss_in_double_precision_of_single() -> None:
    """Logits that are cast before the loss are summed in what they are cast to."""
    torch.manual_seed(0)
    head, x, targets = nn.Linear(16, 600), torch.randn(64, 16), torch.randint(600, (64,))
    expected = F.cross_entropy(head(x).double(), targets)
    found = losses.loss_in_chunks(
        x, head.weight, targets, bias=head.bias, class_weight=None, num_chunks=4, ignore_index=-100, reduction="mean",
        label_smoothing=0.0, autocast=losses.Autocast.now(x), dtype=torch.float64, changes=[losses.Cast(torch.float64)],
    )  # fmt: skip
    assert found.dtype is torch.float64
    assert abs(found.item() / expected.item() - 1) < 1e-14


def test_a_scaled_loss_in_half_precision() -> None:
    """Gradients that a scaler lifts into half precision's range are not lost before, nor are large ones."""
    here = batch(512, dtype=torch.float16, has_bias=False)
    for scale in (1.0, 65536.0):
        with torch.autocast("cpu", dtype=torch.float16):
            found, expected = (outcome(loss(here), here, scale) for loss in (chunked, plain))
        assert_close(found, expected, LARGEST_ERROR[torch.float16])
        assert found[1].abs().max() > 0


@pytest.mark.parametrize("num_chunks", [1, 8])
def test_sums_over_rows_that_half_precision_has_no_room_for(num_chunks: int) -> None:
    """Before they are divided by the number of rows: many have the same target, as padding or a frequent token has."""
    drawn = batch(40_000, classes=3, features=4, dtype=torch.float16, has_bias=False)
    hidden, weight = drawn.hidden.detach() + 8, drawn.weight.detach() / 64
    targets = torch.zeros_like(drawn.targets)
    here = Batch(hidden.requires_grad_(), weight.requires_grad_(), None, targets, None)
    wide = Batch(
        hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_(), None, targets, None
    )
    found, expected = outcome(chunked(here, num_chunks), here), outcome(plain(wide), wide)
    assert float(expected[2].abs().max()) * len(targets) > torch.finfo(torch.float16).max
    assert_close([t.double() for t in found], expected, LARGEST_ERROR[torch.float16])


@pytest.mark.parametrize("size", [1e-8, 1e5])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_class_weights_that_half_precision_has_no_room_for(size: float, reduction: str, smoothing: float) -> None:
    """Only their shares of each other count for a mean; plain steps have them in float32."""
    here = batch(512, has_class_weight=True)
    here = here._replace(class_weight=here.class_weight * size)
    how: dict[str, Any] = {"reduction": reduction, "label_smoothing": smoothing}
    with torch.autocast("cpu", dtype=torch.float16):
        found, expected = outcome(chunked(here, **how), here), outcome(plain(here, **how), here, 1.0)
    if reduction == "sum":  # plain gradients are beyond the range: those of the loss in the unit of the weights are not
        small = here._replace(class_weight=here.class_weight / size)
        with torch.autocast("cpu", dtype=torch.float16):
            expected = [t * size for t in outcome(plain(small, **how), small)]
    assert_close(found, expected, LARGEST_ERROR[torch.float16], 0.0)


def test_frozen_weights_and_evaluation() -> None:
    """What needs no gradient gets none, and without gradients there is only the loss."""
    here = batch(has_bias=False)
    frozen = here._replace(weight=here.weight.detach())
    assert torch.equal(outcome(chunked(frozen), frozen)[1], outcome(chunked(here), here)[1])
    probe = here._replace(hidden=here.hidden.detach())
    assert torch.equal(outcome(chunked(probe), probe)[1], outcome(chunked(here), here)[2])
    with torch.no_grad():
        evaluated = chunked(here)
    assert not evaluated.requires_grad
    assert torch.equal(evaluated, chunked(here))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("rows", [0, 5])
def test_nothing_counts(rows: int, reduction: str) -> None:
    """No rows, or none with a target: torch's nan or 0, and gradients of 0."""
    here = batch(rows, has_bias=False)
    here = here._replace(targets=torch.full_like(here.targets, -100))
    found = outcome(chunked(here, reduction=reduction), here)
    assert torch.equal(found[0].isnan(), plain(here, reduction=reduction).isnan())
    assert not found[1].any()
    assert not found[2].any()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_rows_that_count_nothing(smoothing: float) -> None:
    """All targets are of classes of weight 0, with rows that are not ignored: nan is not hidden, as torch's is not."""
    here = batch(has_class_weight=True)
    here = here._replace(class_weight=torch.where(torch.arange(50) < 25, 0.0, 1.0), targets=here.targets % 25)
    found, expected = (outcome(loss(here, label_smoothing=smoothing), here) for loss in (chunked, plain))
    assert not any(t.isfinite().all() for t in (*found, *expected))


def test_no_features() -> None:
    """All that counts is the bias."""
    here = batch(features=0)
    assert_close(outcome(chunked(here), here)[:1], outcome(plain(here), here)[:1], 1e-6)


@pytest.mark.filterwarnings("ignore:.*Function.*should not be instantiated:DeprecationWarning")  # torch.compile itself
def test_compiled() -> None:
    """torch.compile traces it without a break; chunks are unrolled."""
    here = batch(has_bias=False)

    def step(hidden: Tensor) -> Tensor:
        return chunked_linear_cross_entropy(hidden.tanh(), here.weight, here.targets, num_chunks=3)

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    assert all(map(torch.equal, outcome(compiled(here.hidden), here), outcome(step(here.hidden), here)))


def test_no_second_derivative() -> None:
    """It is refused rather than wrong."""
    here = batch()
    with pytest.raises(UnsupportedError, match="no second derivative: call backward without create_graph"):
        torch.autograd.grad(chunked(here), here.hidden, create_graph=True)


@pytest.mark.parametrize(
    ("changes", "how", "message"),
    [
        ({}, {"num_chunks": 0}, "num_chunks=0 is no positive int"),
        ({}, {"num_chunks": True}, "num_chunks=True is no positive int"),
        ({}, {"reduction": "none"}, "reduction='none' is not supported: choose one of 'mean', 'sum'"),
        ({}, {"label_smoothing": 1.5}, r"label_smoothing=1.5 is outside of \[0, 1\]"),
        ({"weight": torch.zeros(50, 17)}, {}, r"weight of shape \(50, 17\) do not match"),
        ({"targets": torch.zeros(47, dtype=torch.int64)}, {}, r"give one for each row, \(48,\)"),
        ({"targets": torch.zeros(48)}, {}, "targets are torch.float32: give class indices in torch.int64"),
        ({"bias": torch.zeros(1)}, {}, r"bias of shape \(1,\) does not match.*give one number for each class, \(50,\)"),
        ({"class_weight": torch.ones(51)}, {}, r"class_weight of shape \(51,\) does not match"),
        ({"class_weight": torch.ones(50, requires_grad=True)}, {}, "class_weight requires a gradient and gets none"),
    ],
)
def test_refuses(changes: dict[str, Any], how: dict[str, Any], message: str) -> None:
    """An error echoes the value and says what is allowed."""
    with pytest.raises(UnsupportedError, match=message):
        chunked(batch()._replace(**changes), **how)


@pytest.mark.parametrize("num_chunks", [1, 4, 16])
def test_memory(num_chunks: int) -> None:
    """Beside the gradients and what they are accumulated in there is twice a chunk of the logits, counted op by op."""
    here = batch(512, 8192, 16, has_bias=False)
    logits_bytes, accumulated_bytes = 4 * 512 * 8192, here.hidden.nbytes + here.weight.nbytes

    def peak_of(loss: Loss) -> int:
        with LiveStorageTracker() as tracker:
            tracker.register(here.hidden, here.weight, here.targets)
            before = tracker.live_bytes
            with tracker.window() as window:
                outcome(loss(here, num_chunks), here)
        return window.peak_bytes - before

    assert peak_of(plain) > 3 * logits_bytes
    row_bytes = 20 * 8 * 512  # of targets, weights, losses
    assert (
        peak_of(chunked) <= max(2 * logits_bytes // num_chunks + accumulated_bytes, 2 * accumulated_bytes) + row_bytes
    )


class Speaker(nn.Module):
    """A small language model whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(2048, 32)
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(4))
        )
        self.head = nn.Linear(32, 2048, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.layers(self.embedding(tokens))
        targets = F.pad(tokens[:, 1:], (0, 1), value=-100)
        return chunked_linear_cross_entropy(hidden, self.head.weight, targets)


def trained(budget: str | None) -> tuple[list[Tensor], Any]:
    """Losses and weights of a few steps, and the report."""
    torch.manual_seed(0)
    model = Speaker()
    tokens = torch.randint(0, 2048, (8, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    with MemoryPlugin(budget=budget, device="cpu", module=model) as memory:
        for _ in range(4):
            optimizer.zero_grad()
            with memory.step(tokens):
                loss = model(tokens)
                loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        report = memory.report()
    return [*losses, *(p.detach() for p in model.parameters())], report


def test_within_a_budget() -> None:
    """Under a plan that swaps and recomputes, bit for bit the plain steps."""
    expected, plainly = trained(None)
    budget = int(0.75 * plainly.plain_peak_bytes)
    found, report = trained(f"{budget}B")
    assert all(map(torch.equal, found, expected))
    assert report.swapped_bytes + report.recomputed_bytes > 0
    assert report.measured_peak_bytes <= budget
