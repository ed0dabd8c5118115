"""Unusual training loops: accumulation, moving weights, two optimizers, changing shapes, sparse weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from tests.zoo.case import Case, Job, Scope, adamw, integers, normal, simple
from tests.zoo.models.sandwich import ROWS, WIDTH, Sandwich, body_case, rows, square_loss
from tests.zoo.models.sequence import Adversaries


def _wave(x: Tensor) -> Tensor:
    return x.sin() * x.exp().clamp(max=2.0)


def _accumulate(job: Job, batch: Any, scope: Scope) -> None:
    """Two micro-batches for one update."""
    for part in batch.chunk(2):
        with scope.step(part):
            with scope.forward():
                loss = square_loss(job.model, part) / 2
            scope.backward(loss)
        scope.record("loss", loss)
    scope.update(*job.optimizers)


def _accumulate_one_backward(job: Job, batch: Any, scope: Scope) -> None:
    """Several forwards of one model, and one backward of their sum, in one step."""
    with scope.step(batch):
        with scope.forward():
            loss = sum((square_loss(job.model, part) for part in batch.chunk(3)), torch.zeros(()))
        scope.backward(loss)
    scope.record("loss", loss)
    scope.update(*job.optimizers)


class _BiasOnly(nn.Module):
    """`(x + bias).sin()`: the bias is not needed by plain backward, and would be by a recomputation."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.full((WIDTH,), 0.1))
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Return the wave of the shifted input."""
        return (x.detach() + self.bias).sin() * x


def _optimizer_between(job: Job, batch: Any, scope: Scope) -> None:
    """The optimizer moves biases between the forward and the backward that they took part in."""
    with scope.step(batch):
        with scope.forward():
            loss = square_loss(job.model, batch)
        for optimizer in job.optimizers[1:]:
            for group in optimizer.param_groups:
                for bias in group["params"]:
                    bias.grad = torch.full_like(bias, 0.2)
            optimizer.step()
            optimizer.zero_grad()
        scope.backward(loss)
    scope.record("loss", loss)
    scope.update(job.optimizer)


def _two_groups(model: nn.Module) -> Sequence[Optimizer]:
    body = [p for name, p in model.named_parameters() if name.startswith("body")]
    rest = [p for name, p in model.named_parameters() if not name.startswith("body")]
    return torch.optim.SGD(rest, lr=0.01, momentum=0.9), torch.optim.SGD(body, lr=0.05)


def _frozen_half_way(job: Job, batch: Any, scope: Scope) -> None:
    """Half of the layers stop training at the third step."""
    if job.index == 2:
        for weight in job.model.layers[0].parameters():  # type: ignore[index,union-attr]
            weight.requires_grad_(False)
    simple(square_loss)(job, batch, scope)


def _mode_switch(job: Job, batch: Any, scope: Scope) -> None:
    """Dropout is off in every third step, so that the same shape has two graphs."""
    job.model.train(job.index % 3 != 2)
    simple(square_loss)(job, batch, scope)


def _many_shapes(step: int) -> Tensor:
    return normal(step, (ROWS, ROWS // 2, ROWS - 100)[step % 3 if step < 6 else step % 2], WIDTH)


class _Skipping(nn.Module):
    """Layers that are skipped at random."""

    def forward(self, x: Tensor) -> Tensor:
        """Skip in one of three cases."""
        if torch.rand(()).item() < 0.33:
            return x
        return functional.dropout(_wave(x), 0.1)


class _Tied(nn.Module):
    """A token model whose embedding is its head, and one layer used twice."""

    def __init__(self, vocabulary: int = 96, *, sparse: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, WIDTH, sparse=sparse)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.tied = not sparse
        self.head = nn.Linear(WIDTH, vocabulary, bias=False)
        if self.tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return next-token scores."""
        x = self.embed(tokens)
        x = functional.gelu(self.layer(functional.gelu(self.layer(x)))) + x
        out: Tensor = self.head(x)
        return out


def _token_loss(model: nn.Module, batch: Tensor) -> Tensor:
    scores = model(batch)
    return functional.cross_entropy(scores.flatten(0, 1), batch.roll(1, 1).flatten())


def _sparse_sgd(model: nn.Module) -> Sequence[Optimizer]:
    return (torch.optim.SGD(model.parameters(), lr=0.05),)


def two_adams(model: nn.Module) -> Sequence[Optimizer]:
    assert isinstance(model, Adversaries)
    return adamw(model.generator)[0], adamw(model.discriminator)[0]


def _bce(scores: Tensor, label: float) -> Tensor:
    return functional.binary_cross_entropy_with_logits(scores, torch.full_like(scores, label))


def gan_step(job: Job, batch: tuple[Tensor, Tensor], scope: Scope) -> None:
    """Two steps with an update each: first the discriminator, then the generator."""
    assert isinstance(job.model, Adversaries)
    generator, discriminator = job.model.generator, job.model.discriminator
    real, noise = batch
    with scope.step(real, noise):
        with scope.forward():
            fake = generator(noise).detach()
            loss = _bce(discriminator(real), 1.0) + _bce(discriminator(fake), 0.0)
        scope.backward(loss)
    scope.record("discriminator", loss)
    scope.update(job.optimizers[1])
    with scope.step(noise):
        with scope.forward():
            loss = _bce(discriminator(generator(noise)), 1.0)
        scope.backward(loss)
    scope.record("generator", loss)
    scope.update(job.optimizers[0])
    job.optimizers[1].zero_grad()


def _gan_in_one(job: Job, batch: tuple[Tensor, Tensor], scope: Scope) -> None:
    """As Lightning's manual optimization: both forwards, backwards and updates inside one step."""
    assert isinstance(job.model, Adversaries)
    generator, discriminator = job.model.generator, job.model.discriminator
    real, noise = batch
    with scope.step(batch):
        fake = generator(noise)
        loss = _bce(discriminator(real), 1.0) + _bce(discriminator(fake.detach()), 0.0)
        scope.backward(loss)
        scope.record("discriminator", loss)
        scope.update(job.optimizers[1])
        loss = _bce(discriminator(fake), 1.0)
        scope.backward(loss)
        scope.record("generator", loss)
        scope.update(job.optimizers[0])
        job.optimizers[1].zero_grad()


def _gan_batch(step: int) -> tuple[Tensor, Tensor]:
    return normal(step, 48, 3, 32, 32), normal(step, 48, 16, 1, 1, salt=3)


def closure_step(job: Job, batch: Any, scope: Scope) -> None:
    """LBFGS calls forward and backward several times in one update."""

    def closure() -> Tensor:
        job.optimizer.zero_grad()
        with scope.step(batch):
            with scope.forward():
                loss = square_loss(job.model, batch)
            scope.backward(loss)
        scope.record("loss", loss)
        return loss

    job.optimizer.step(closure)  # type: ignore[arg-type]


def _lbfgs(model: nn.Module) -> Sequence[Optimizer]:
    return (torch.optim.LBFGS(model.parameters(), lr=0.05, max_iter=2),)


class _Graph(nn.Module):
    """A graph convolution with a sparse adjacency."""

    def forward(self, x: Tensor) -> Tensor:
        """Average over a ring of neighbours."""
        nodes = torch.arange(x.shape[0], device=x.device)
        index = torch.stack([nodes, nodes.roll(3)])
        ones = torch.ones(x.shape[0], device=x.device)
        ring = torch.sparse_coo_tensor(index, ones, (x.shape[0], x.shape[0]), check_invariants=True)
        return torch.sparse.mm(ring, x).sin() * x


def _tokens(step: int) -> Tensor:
    return integers(step, 96, 24, 48)


def _dropped() -> nn.Module:
    return Sandwich(nn.Sequential(nn.GELU(), nn.Dropout(0.2)))


TRAINING: tuple[Case, ...] = (
    body_case("accumulation", _wave, train_step=_accumulate),
    body_case("accumulation-one-backward", _wave, train_step=_accumulate_one_backward, depth=2),
    body_case("optimizer-between", module=_BiasOnly, train_step=_optimizer_between, optimizers=_two_groups),
    body_case("frozen-half-way", _wave, train_step=_frozen_half_way, steps=7, static=False),
    body_case("skipped-layers", module=_Skipping, steps=8, static=False),
    body_case("sparse-adjacency", module=_Graph, depth=2),
    body_case("lbfgs", torch.tanh, train_step=closure_step, optimizers=_lbfgs, depth=2, grows=True),
    Case(name="mode-switch", build=_dropped, batch=rows, train_step=_mode_switch, static=False, steps=8),
    Case(
        name="changing-shapes",
        build=_dropped,
        batch=_many_shapes,
        train_step=simple(square_loss),
        static=False,
        steps=12,
    ),
    Case(name="tied-weights", build=_Tied, batch=_tokens, train_step=simple(_token_loss), budgeted=True),
    Case(
        name="sparse-gradients",
        build=lambda: _Tied(sparse=True),
        batch=_tokens,
        train_step=simple(_token_loss),
        optimizers=_sparse_sgd,
    ),
    Case(name="gan", build=Adversaries, batch=_gan_batch, train_step=gan_step, optimizers=two_adams),
    Case(
        name="gan-in-one-step",
        build=Adversaries,
        batch=_gan_batch,
        train_step=_gan_in_one,
        optimizers=two_adams,
        split=False,
        steps=7,  # the optimizers make their state in the first step, which so differs from the others
    ),
)
