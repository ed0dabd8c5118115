"""Logits that are computed when they are read: whatever a program does with them, it gets what it would have got."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_offload import UnsupportedError
from lightning_offload.tensors.deferred_logits import DeferredLogits, Readers, defer, note_update

BATCH, TOKENS, FEATURES, CLASSES = 3, 6, 4, 7

Program = Callable[[Tensor, Tensor], Tensor]


class _Squares(torch.autograd.Function):
    """A loss of a program's own: torch shows subclasses nothing of its call."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        ctx.save_for_backward(logits * 2)
        return (logits * logits).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (twice,) = ctx.saved_tensors
        result: Tensor = gradient * twice
        return result


def _written(logits: Tensor, targets: Tensor) -> Tensor:
    rows = logits.view(-1, CLASSES)  # before its base is written
    logits[..., 2] = -3.0
    return F.cross_entropy(rows, targets.view(-1))


def _divided(logits: Tensor, targets: Tensor) -> Tensor:
    logits /= 2.0
    return F.cross_entropy(logits.view(-1, CLASSES), targets.view(-1))


def _hooked(logits: Tensor, targets: Tensor) -> Tensor:
    logits.register_hook(lambda gradient: gradient * 3)
    return F.cross_entropy(logits.view(-1, CLASSES), targets.view(-1))


def _measured(logits: Tensor, targets: Tensor) -> Tensor:
    loss = F.cross_entropy(logits.view(-1, CLASSES), targets.view(-1))
    with torch.no_grad():
        share = (logits.detach().argmax(-1) == targets).double().mean()
    return loss + share


def _then(*, write: Callable[[Tensor], object], copy_of: Callable[[Tensor], Tensor]) -> Program:
    """Something is made of logits, then they are written, and the loss is of what was made before."""

    def program(logits: Tensor, targets: Tensor) -> Tensor:
        made = copy_of(logits)
        with torch.no_grad():
            write(logits)
        return F.cross_entropy(made.reshape(-1, CLASSES), targets.reshape(-1)[: made.numel() // CLASSES])

    return program


def _written_copy(logits: Tensor, targets: Tensor) -> Tensor:
    part = logits[:, :-1].contiguous()
    part.mul_(0.1)
    return F.cross_entropy(logits.view(-1, CLASSES), targets.view(-1)) + part.sum()


def _constant_written(logits: Tensor, targets: Tensor) -> Tensor:
    numbers = torch.arange(CLASSES, dtype=torch.float64)
    moved = logits + numbers
    numbers.zero_()
    return F.cross_entropy(moved.view(-1, CLASSES), targets.view(-1))


def _shift_and_metric(logits: Tensor, targets: Tensor) -> Tensor:
    rows = logits[..., :-1, :].contiguous().view(-1, CLASSES)
    loss = F.cross_entropy(rows, targets[:, 1:].reshape(-1))
    return loss + (rows.argmax(-1) == targets[:, 1:].flatten()).double().mean()


def _metric_in_inference_mode(logits: Tensor, targets: Tensor) -> Tensor:
    with torch.inference_mode():
        assert logits.argmax(-1).shape == targets.shape
        assert logits.detach().float().sum().ndim == 0
    return F.cross_entropy(logits.view(-1, CLASSES), targets.view(-1))


def _saved_by_a_function(logits: Tensor, targets: Tensor) -> Tensor:
    return _Squares.apply(logits) + logits.logsumexp(-1).square().mean()


def _numpy_written(logits: Tensor, targets: Tensor) -> Tensor:
    logits.detach().numpy()[..., 2] = -5.0
    return F.cross_entropy(logits.view(-1, CLASSES), targets.view(-1))


def _data_written(logits: Tensor, targets: Tensor) -> Tensor:
    logits.view(-1, CLASSES).data[..., 2] = -5.0
    return F.cross_entropy(logits.view(-1, CLASSES), targets.view(-1))


def _node_hooked(logits: Tensor, targets: Tensor) -> Tensor:
    assert logits.grad_fn is not None
    logits.grad_fn.register_prehook(lambda gradients: (gradients[0] * 3,))
    return F.cross_entropy(logits.view(-1, CLASSES), targets.view(-1))


def _leaf(logits: Tensor, targets: Tensor) -> Tensor:
    leaf = logits.detach()
    leaf.requires_grad = True
    F.cross_entropy(leaf.view(-1, CLASSES), targets.view(-1)).backward()
    return (leaf.grad * logits).sum()


def _unbound_and_written(logits: Tensor, targets: Tensor) -> Tensor:
    first = logits.unbind()[0]
    other = logits.clone()
    with torch.no_grad():
        first.zero_()
    return F.cross_entropy(other.view(-1, CLASSES), targets.view(-1))


CHUNKED: dict[str, Program] = {
    "shift and metric": _shift_and_metric,
    "inference mode": _metric_in_inference_mode,
    "constant written": _constant_written,
    "written copy": _written_copy,
    "rows": lambda logits, targets: F.cross_entropy(logits.view(-1, CLASSES), targets.view(-1)),
    "reshape": lambda logits, targets: F.cross_entropy(torch.reshape(logits, (-1, CLASSES)), targets.flatten()),
    "unknown": lambda logits, targets: F.cross_entropy(logits.reshape(BATCH * TOKENS, -1), targets.flatten()),
    "flatten": lambda logits, targets: F.cross_entropy(logits.flatten(0, 1), targets.flatten()),
    "module": lambda logits, targets: nn.CrossEntropyLoss()(logits.flatten(end_dim=-2), targets.flatten()),
    "shifted": lambda logits, targets: F.cross_entropy(
        logits[..., :-1, :].contiguous().view(-1, CLASSES), targets[..., 1:].contiguous().view(-1)
    ),
    "two slices": lambda logits, targets: F.cross_entropy(logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten()),
    "mask": lambda logits, targets: F.cross_entropy(logits[targets > 2], targets[targets > 2]),
    "rows by number": lambda logits, targets: F.cross_entropy(logits[torch.tensor([0, 2]), 1], targets[[0, 2], 1]),
    "one": lambda logits, targets: F.cross_entropy(logits[1], targets[1]),
    "second": lambda logits, targets: F.cross_entropy(logits.transpose(1, 2), targets),
    "permuted": lambda logits, targets: F.cross_entropy(logits.permute(0, 2, 1).float().double(), targets),
    "smooth": lambda logits, targets: F.cross_entropy(logits.flatten(0, 1), targets.flatten(), label_smoothing=0.1),
    "sum": lambda logits, targets: F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / 5,
    "weights": lambda logits, targets: F.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), torch.arange(1.0, CLASSES + 1, dtype=torch.float64)
    ),
    "ignored": lambda logits, targets: F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=3),
    "scaled": lambda logits, targets: F.cross_entropy((logits * 3 / 2.5).flatten(0, 1), targets.flatten()),
    "capped": lambda logits, targets: F.cross_entropy(
        (torch.tanh(logits / 0.7) * 0.7).flatten(0, 1), targets.flatten(), label_smoothing=0.2
    ),
    "moved": lambda logits, targets: F.cross_entropy(
        (logits + torch.arange(CLASSES, dtype=torch.float64).view(1, 1, -1)).flatten(0, 1), targets.flatten()
    ),
    "cast": lambda logits, targets: F.cross_entropy(
        logits.to(torch.float32).to(torch.float64).flatten(0, 1), targets.flatten()
    ),
    "measured": _measured,
    "metric of a copy": lambda logits, targets: (
        F.cross_entropy(logits.flatten(0, 1), targets.flatten()) + logits.detach().clone().logsumexp(-1).mean()
    ),
    "two": lambda logits, targets: F.cross_entropy(logits[0], targets[0]) + 2 * F.cross_entropy(logits[1], targets[1]),
    "with another": lambda logits, targets: (
        F.cross_entropy(logits.flatten(0, 1), targets.flatten()) + logits.logsumexp(-1).square().mean()
    ),
}
WHOLE: dict[str, Program] = {
    "copy, then written": _then(copy_of=lambda t: t.clone(), write=lambda t: t.mul_(0.3)),
    "product, then written": _then(copy_of=lambda t: t * 2, write=lambda t: t[..., 2].fill_(-5)),
    "cast, then written": _then(copy_of=lambda t: t.float().double(), write=lambda t: t.detach().zero_()),
    "rows, then written": _then(copy_of=lambda t: t[torch.tensor([0, 2])], write=lambda t: t.detach().zero_()),
    "view, then written": _then(copy_of=lambda t: t[1:], write=lambda t: t.view(-1).zero_()),
    "swapped, then written": _then(copy_of=lambda t: t.transpose(1, 2).mT, write=lambda t: t.mul_(2)),
    "unbound": _unbound_and_written,
    "saved by a function": _saved_by_a_function,
    "numpy": _numpy_written,
    "data": _data_written,
    "hook of the node": _node_hooked,
    "a leaf": _leaf,
    "softmax": lambda logits, targets: -logits.log_softmax(-1).gather(-1, targets.unsqueeze(-1)).mean(),
    "each": lambda logits, targets: (
        F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").square().mean()
    ),
    "soft targets": lambda logits, targets: F.cross_entropy(
        logits.flatten(0, 1), F.one_hot(targets.flatten(), CLASSES).double()
    ),
    "class slice": lambda logits, targets: F.cross_entropy(logits[..., :-1].flatten(0, 1), targets.flatten() % 6),
    "class mask": lambda logits, targets: logits[torch.ones(BATCH, TOKENS, CLASSES, dtype=torch.bool)].square().sum(),
    "sum of squares": lambda logits, targets: (logits * logits).sum(),
    "right": lambda logits, targets: F.cross_entropy((1.0 - logits).flatten(0, 1), targets.flatten()),
    "other dims": lambda logits, targets: F.cross_entropy(logits.transpose(0, 1).flatten(0, 1), targets.T.flatten()),
    "transposed rows": lambda logits, targets: logits.mT.reshape(BATCH, -1).sin().sum(),
    "written": _written,
    "divided": _divided,
    "hooked": _hooked,
    "function": lambda logits, targets: _Squares.apply(logits),
    "function of rows": lambda logits, targets: _Squares.apply((logits.view(-1, CLASSES) / 3).tanh()),
    "function of swapped": lambda logits, targets: _Squares.apply(logits.transpose(1, 2)),
    "list": lambda logits, targets: torch.stack([logits, logits]).sin().sum(),
    "iterated": lambda logits, targets: sum((row.cos().sum() for row in logits), torch.zeros(())),
    "in a product": lambda logits, targets: torch.ones(CLASSES, dtype=torch.float64) @ logits.flatten(0, 1).T.sum(1),
}


def _leaves(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = ((BATCH, TOKENS, FEATURES), (CLASSES, FEATURES), (CLASSES,))
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def _targets() -> Tensor:
    return torch.randint(0, CLASSES, (BATCH, TOKENS), generator=torch.Generator().manual_seed(2))


def _both(program: Program, leaves: list[Tensor], readers: Readers) -> tuple[list[Tensor], list[Tensor]]:
    """Loss and gradients, as they are plainly and with logits that are put off."""
    found = []
    for make in (F.linear, lambda *args: defer(*args, readers)):
        loss = program(make(leaves[0] * 1.0, *leaves[1:]), _targets())
        found.append([loss.detach(), *torch.autograd.grad(loss, leaves)])
    return found[0], found[1]


def _check(expected: list[Tensor], actual: list[Tensor], largest: float = 1e-13) -> None:
    for one, other in zip(expected, actual, strict=True):
        assert type(other) is Tensor
        assert one.dtype is other.dtype
        assert (one - other).abs().max() <= largest * one.abs().max().clamp_min(1)


@pytest.mark.parametrize("name", CHUNKED)
def test_in_chunks(name: str) -> None:
    """The loss is computed in chunks, and is torch's own, as its gradients are."""
    readers = Readers()
    largest = 1e-6 if name in ("permuted", "cast") else 1e-13  # autograd casts gradients of what was cast, too
    _check(*_both(CHUNKED[name], _leaves(), readers), largest)
    assert readers.num_chunked == (2 if name == "two" else 1)
    read = ("measured", "metric of a copy", "with another", "shift and metric", "inference mode", "written copy")
    assert bool(readers.others) == (name in read)


@pytest.mark.parametrize("name", WHOLE)
def test_as_a_whole(name: str) -> None:
    """What is no cross-entropy has the logits, with their graph; who read them is known."""
    readers = Readers()
    expected, actual = _both(WHOLE[name], _leaves(), readers)
    _check(expected, actual)
    assert readers.num_chunked <= (" written" in name)  # what was made before the write is not always chunked
    assert __file__ in readers.others[0] or "_tensor.py" in readers.others[0]


def test_computed_once() -> None:
    """Reading twice is one tensor, and views of it are on its memory."""
    hidden, weight, bias = _leaves()
    logits = defer(hidden, weight, bias, Readers())
    assert isinstance(logits, DeferredLogits)
    rows = logits.view(-1, CLASSES)
    assert rows.sin().grad_fn is not None
    assert logits.data_ptr() == rows.data_ptr() == logits.data_ptr()
    assert torch.equal(logits.detach(), F.linear(hidden, weight, bias))


def test_what_costs_nothing() -> None:
    """Shapes, types and devices are known without any number."""
    readers = Readers()
    logits = defer(*_leaves(), readers)
    assert logits.shape == (BATCH, TOKENS, CLASSES)
    assert logits.size(-1) == CLASSES
    assert (logits.dim(), len(logits), logits.numel()) == (3, BATCH, BATCH * TOKENS * CLASSES)
    assert (logits.dtype, logits.device, logits.requires_grad) == (torch.float64, torch.device("cpu"), True)
    assert type(logits.to("cpu").to(torch.float64).contiguous()) is DeferredLogits
    assert logits.float().dtype is torch.float32
    assert not logits.detach().requires_grad
    assert logits.transpose(1, 2).shape == (BATCH, CLASSES, TOKENS)
    with torch.no_grad():
        assert not logits.view(-1, CLASSES).requires_grad
    assert not readers.others
    assert not logits.data.requires_grad


@pytest.mark.parametrize("name", [*CHUNKED, *WHOLE])
def test_autocast(name: str) -> None:
    """The layer computes in what it would have, wherever it is read."""
    leaves = _leaves(torch.float32)
    found = []
    for make in (F.linear, lambda *args: defer(*args, Readers())):
        with torch.autocast("cpu", torch.bfloat16):
            logits = make(leaves[0] * 1.0, *leaves[1:])
        assert logits.dtype is torch.bfloat16
        loss = {**CHUNKED, **WHOLE}[name](logits.float().double(), _targets())
        found.append([loss.detach(), *torch.autograd.grad(loss, leaves)])
    expected, actual = found
    for one, other in zip(expected, actual, strict=True):
        assert (one - other).abs().max() <= 0.05 * one.abs().max()


def _random_program(seed: int) -> Program:
    """Changes of logits at random, then a loss."""
    choose = random.Random(seed)
    shifts = torch.randn(CLASSES, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)

    def changed(logits: Tensor, step: int) -> Tensor:
        ways: list[Callable[[Tensor], Tensor]] = [
            lambda t: t * 1.5,
            lambda t: t / 0.8,
            torch.tanh,
            lambda t: t + shifts,
            lambda t: t.double(),
            lambda t: t.contiguous(),
            lambda t: t.detach() + t - t.detach(),
            lambda t: t.sin(),
            lambda t: t.mul_(0.9) if step else t,
            lambda t: t.clone(),
        ]
        return choose.choice(ways)(logits)

    def program(logits: Tensor, targets: Tensor) -> Tensor:
        choose.seed(seed)
        kept = logits
        for step in range(choose.randrange(5)):
            logits = changed(logits, step)
            if choose.random() < 0.2:
                kept.sum()
        shape = choose.randrange(4)
        if shape == 0:
            logits, targets = logits.transpose(1, 2), targets.clone()
        elif shape == 1:
            logits, targets = logits[:, 1:].reshape(-1, CLASSES), targets[:, 1:].flatten()
        elif shape == 2:
            logits, targets = logits[targets != 1], targets[targets != 1]
        else:
            logits, targets = logits.view(-1, CLASSES), targets.view(-1)
        return F.cross_entropy(
            logits, targets, reduction=choose.choice(["mean", "sum"]), label_smoothing=choose.choice([0.0, 0.1])
        )

    return program


@pytest.mark.parametrize("chunk", range(4))
def test_random_programs(chunk: int) -> None:
    """Whatever is done with logits, the loss and all gradients are torch's."""
    num_chunked = 0
    for seed in range(100 * chunk, 100 * (chunk + 1)):
        program, readers = _random_program(seed), Readers()
        try:
            loss = program(F.linear(*_leaves()), _targets())
            loss.backward()
        except RuntimeError:  # it writes what autograd has saved
            continue
        _check(*_both(program, _leaves(), readers))
        num_chunked += readers.num_chunked
    assert 30 < num_chunked < 95


def test_what_was_written_since() -> None:
    """Logits are not computed of what the layer would not have read."""
    hidden, weight, bias = _leaves()
    logits = defer(hidden * 1.0, weight, bias, Readers())
    loss = F.cross_entropy(logits.flatten(0, 1), _targets().flatten())
    loss.backward()
    with torch.no_grad():
        weight.add_(1.0)
    for read in (lambda: logits.sum(), lambda: F.cross_entropy(logits.flatten(0, 1), _targets().flatten())):
        with pytest.raises(
            UnsupportedError, match=r"has been written since \(an optimizer has stepped, say\): read them"
        ):
            read()


def test_what_a_program_changes_between() -> None:
    """Other weights, or others that want gradients, are refused, and not taken for those that the layer read."""
    for change in (
        lambda weight: setattr(weight, "data", weight.data * 2),
        lambda weight: weight.requires_grad_(False),
        lambda weight: note_update(),
    ):
        hidden, weight, bias = _leaves()
        logits = defer(hidden * 1.0, weight, bias, Readers())
        change(weight)
        with pytest.raises(UnsupportedError, match="has been written since"):
            F.cross_entropy(logits.flatten(0, 1), _targets().flatten())


@pytest.mark.parametrize(
    "ask",
    [
        lambda logits, loss: logits.register_hook(print),
        lambda logits, loss: logits.retain_grad(),
        lambda logits, loss: torch.autograd.grad(loss, logits, allow_unused=True),
    ],
)
def test_gradients_of_logits_after_the_loss(ask: Callable[[Tensor, Tensor], object]) -> None:
    """A loss in chunks has none: it says so."""
    logits = defer(*_leaves(), Readers())
    loss = F.cross_entropy(logits.flatten(0, 1), _targets().flatten())
    with pytest.raises(UnsupportedError, match="asks for the gradient of logits whose loss was computed in chunks"):
        ask(logits, loss)


def test_computed_in_another_autocast() -> None:
    """The layer computes as it would have where it was called, whoever reads it where."""
    hidden, weight, bias = _leaves(torch.float32)
    expected = F.linear(hidden, weight, bias)
    for is_off in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=is_off), torch.autocast("cpu", enabled=False):
            logits = defer(hidden, weight, bias, Readers())
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(logits.sin(), expected.sin())


class _Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        result: Tensor = gradient * 3 * x**2
        return result


class _InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return x.mul_(2)


def test_functions_that_are_refused() -> None:
    """Second derivatives through the logits' own node, and writes out of torch's sight."""
    hidden, weight, bias = _leaves()
    cubes = _Cube.apply(defer(hidden, weight, bias, Readers())).sum()  # type: ignore[no-untyped-call]
    with pytest.raises(UnsupportedError, match="have no second derivative"):
        torch.autograd.grad(cubes, hidden, create_graph=True)
    with pytest.raises(UnsupportedError, match=r"aten\.mul_\.Tensor writes into logits"):
        _InPlace.apply(defer(hidden, weight, bias, Readers()))  # type: ignore[no-untyped-call]


def test_copies() -> None:
    """Copies and pickles are of the numbers."""
    hidden, weight, bias = _leaves()
    expected = F.linear(hidden, weight, bias).detach()
    logits = defer(hidden, weight, bias, Readers()).detach()
    for other in (copy.deepcopy(logits), pickle.loads(pickle.dumps(logits)), logits.clone(), logits.cpu()):
        assert torch.equal(other, expected)
    assert logits.tolist() == expected.tolist()
    assert repr(logits) == repr(expected)


def test_second_derivatives() -> None:
    """There are none of a loss in chunks, and it says how to have them."""
    hidden, weight, bias = _leaves()
    loss = F.cross_entropy(defer(hidden, weight, bias, Readers()).flatten(0, 1), _targets().flatten())
    with pytest.raises(UnsupportedError, match="leave chunked_loss=True out"):
        torch.autograd.grad(loss, hidden, create_graph=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_with_scales(dtype: torch.dtype) -> None:
    """Gradients of many rows, of logits that were scaled up, are within the range of float16."""
    leaves = [leaf.detach().to(dtype) for leaf in _leaves()]
    leaves[0] = torch.cat([leaves[0]] * 2000)
    targets = torch.zeros(len(leaves[0]) * TOKENS, dtype=torch.int64)
    found = []
    for group in (
        [leaf.requires_grad_() for leaf in leaves],
        [leaf.detach().double().requires_grad_() for leaf in leaves],
    ):
        loss = F.cross_entropy((defer(*group, Readers()) * 40.0).flatten(0, 1).float(), targets)
        found.append(torch.autograd.grad(loss, group))
    for one, other in zip(*found, strict=True):
        assert one.isfinite().all()
        assert (one.double() - other).abs().max() <= 0.05 * other.abs().max()
