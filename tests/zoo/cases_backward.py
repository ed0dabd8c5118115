"""Unusual backwards: repeated, higher order, partial, under autocast, through `torch.autograd.grad`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.zoo.case import Case, Job, Scope
from tests.zoo.models.sandwich import Sandwich, body_case, rows, square_loss


def _wave(x: Tensor) -> Tensor:
    return x.sin() * x.exp().clamp(max=2.0)


def _twice(job: Job, batch: Any, scope: Scope) -> None:
    """Two backwards over one graph, the first with retain_graph."""
    with scope.step(batch):
        with scope.forward():
            out = job.model(batch)
            first, second = out.square().mean(), out.abs().mean()
        scope.backward(first, retain_graph=True)
        scope.backward(second)
    scope.record("loss", (first, second))
    scope.update(*job.optimizers)


def _same_twice(job: Job, batch: Any, scope: Scope) -> None:
    """The same backward twice, which adds the gradients up."""
    with scope.step(batch):
        with scope.forward():
            loss = square_loss(job.model, batch)
        scope.backward(loss, retain_graph=True)
        scope.backward(loss)
    scope.record("loss", loss)
    scope.update(*job.optimizers)


def _penalty(job: Job, batch: Any, scope: Scope) -> None:
    """A gradient penalty: the loss contains the norm of a gradient."""
    with scope.step(batch):
        with scope.forward():
            inputs = batch.detach().clone().requires_grad_()
            out = job.model(inputs)
            (grad,) = torch.autograd.grad(out.sum(), inputs, create_graph=True)
            loss = out.square().mean() + (grad.norm(dim=1) - 1).square().mean()
        scope.backward(loss)
    scope.record("loss", loss)
    scope.record("inputs.grad", inputs.grad)
    scope.update(*job.optimizers)


def _by_grad(job: Job, batch: Any, scope: Scope) -> None:
    """Gradients by `torch.autograd.grad`, assigned by hand."""
    weights = [p for p in job.model.parameters() if p.requires_grad]
    with scope.step(batch):
        with scope.forward():
            loss = square_loss(job.model, batch)
        with scope.backward_scope():
            grads = torch.autograd.grad(loss, weights)
    for weight, grad in zip(weights, grads, strict=True):
        weight.grad = grad
    del grads, grad
    scope.record("loss", loss)
    scope.update(*job.optimizers)


def _several_roots(job: Job, batch: Any, scope: Scope) -> None:
    """One backward from two losses, then one restricted to some inputs."""
    weights = list(job.model.parameters())
    with scope.step(batch):
        with scope.forward():
            out = job.model(batch)
            roots = [out.square().mean(), out.sin().mean()]
        with scope.backward_scope():
            torch.autograd.backward(roots, retain_graph=True)
        scope.backward(roots[0], inputs=weights[:2])
    scope.record("loss", roots)
    scope.update(*job.optimizers)


def _inner_loop(job: Job, batch: Any, scope: Scope) -> None:
    """Meta-learning: an inner update by functional_call, then backward through it."""
    weights = dict(job.model.named_parameters())
    with scope.step(batch):
        with scope.forward():
            inner = torch.func.functional_call(job.model, weights, (batch[:256],)).square().mean()
            grads = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
            moved = {name: w - 0.1 * g for (name, w), g in zip(weights.items(), grads, strict=True)}
            loss = torch.func.functional_call(job.model, moved, (batch[256:],)).square().mean()
        scope.backward(loss)
    del grads, moved
    scope.record("loss", loss)
    scope.update(*job.optimizers)


def _under_autocast(job: Job, batch: Any, scope: Scope) -> None:
    """Backward called under autocast, which a replay must not inherit."""
    with scope.step(batch), torch.autocast(batch.device.type, dtype=torch.bfloat16):
        with scope.forward():
            loss = square_loss(job.model, batch)
        scope.backward(loss)
    scope.record("loss", loss)
    scope.update(*job.optimizers)


def _only_backward_under_autocast(job: Job, batch: Any, scope: Scope) -> None:
    """Forward in full precision, backward under autocast."""
    with scope.step(batch):
        with scope.forward():
            loss = square_loss(job.model, batch)
        with torch.autocast(batch.device.type, dtype=torch.bfloat16):
            scope.backward(loss)
    scope.record("loss", loss)
    scope.update(*job.optimizers)


def _autocast(job: Job, batch: Any, scope: Scope) -> None:
    """The usual mixed precision: forward alone under autocast, a block of it switched off again."""
    kind = batch.device.type
    with scope.step(batch):
        with scope.forward():
            with torch.autocast(kind, dtype=torch.bfloat16):
                out = job.model(batch)
                with torch.autocast(kind, enabled=False):
                    tail = functional.linear(out.float(), job.model.layers[0].weight)  # type: ignore[index,union-attr]
                out = job.model(tail)
            loss = out.float().square().mean()
        scope.backward(loss)
    scope.record("loss", loss)
    scope.update(*job.optimizers)


def _unused_outputs(job: Job, batch: Any, scope: Scope) -> None:
    """Outputs that are never backpropagated, one of which outlives the step."""
    with scope.step(batch):
        with scope.forward():
            out = job.model(batch)
            unused = job.model(batch * 0.5).exp()
            metric = (out.sin() * out).mean()
            loss = out.square().mean()
        scope.backward(loss)
    scope.record("loss", (loss, metric))
    scope.update(*job.optimizers)
    scope.record("unused", unused.sum())


def _input_gradients(job: Job, batch: Any, scope: Scope) -> None:
    """The batch itself requires gradients."""
    inputs = batch.clone().requires_grad_()
    with scope.step(inputs):
        with scope.forward():
            loss = square_loss(job.model, inputs.sin() * 1.5)
        scope.backward(loss)
    scope.record("loss", loss)
    scope.record("inputs.grad", inputs.grad)
    scope.update(*job.optimizers)


def _input_overwritten(job: Job, batch: Any, scope: Scope) -> None:
    """A static input buffer is refilled between forward and backward; plain backward does not need it."""
    with scope.step(batch):
        with scope.forward():
            loss = square_loss(job.model, (batch * 2.0).sin() * 1.5)
            batch.zero_()
        scope.backward(loss)
    scope.record("loss", loss)
    scope.update(*job.optimizers)


def _output_written(job: Job, batch: Any, scope: Scope) -> None:
    """The loss is taken from a slice of the output; the output is used again after backward."""
    with scope.step(batch):
        with scope.forward():
            out = job.model(batch)
            loss = out[::2].square().mean() + out[1::2, :5].abs().sum() / 1000
        scope.backward(loss)
    with torch.no_grad():
        scope.record("output", out.sum(0))
    scope.record("loss", loss)
    scope.update(*job.optimizers)


def _hessian(job: Job, batch: Any, scope: Scope) -> None:
    """A Hessian-vector product with respect to the weights, three levels deep."""
    weights = list(job.model.parameters())
    with scope.step(batch):
        with scope.forward():
            loss = square_loss(job.model, batch)
            grads = torch.autograd.grad(loss, weights, create_graph=True)
            dot = sum(((g * g).sum() for g in grads), torch.zeros(()))
        scope.backward(dot + loss)
    del grads
    scope.record("loss", (loss, dot))
    scope.update(*job.optimizers)


def _smooth() -> nn.Module:
    return Sandwich(torch.tanh, depth=2)


BACKWARD: tuple[Case, ...] = (
    body_case("retain-graph", _wave, train_step=_twice, budgeted=True),
    body_case("retain-graph-same-loss", _wave, train_step=_same_twice),
    body_case("gradient-penalty", torch.tanh, train_step=_penalty, depth=2),
    body_case("autograd-grad", _wave, train_step=_by_grad),
    body_case("several-roots", _wave, train_step=_several_roots),
    body_case("backward-under-autocast", _wave, train_step=_under_autocast),
    body_case("only-backward-under-autocast", _wave, train_step=_only_backward_under_autocast),
    body_case("autocast", functional.gelu, train_step=_autocast, depth=2),
    body_case("unused-outputs", _wave, train_step=_unused_outputs, depth=2),
    body_case("input-gradients", _wave, train_step=_input_gradients, depth=2),
    body_case("input-overwritten", _wave, train_step=_input_overwritten, depth=2),
    body_case("output-used-after", _wave, train_step=_output_written, depth=2),
    Case(name="inner-loop", build=_smooth, batch=rows, train_step=_inner_loop),
    Case(name="hessian", build=_smooth, batch=rows, train_step=_hessian),
)
