"""Autograd's other users inside a step: custom functions, checkpoints, hooks, transforms."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn import functional
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tests.zoo.case import Case
from tests.zoo.models.sandwich import WIDTH, body_case


class _Swish(Function):
    """Saves its input, its output and a tensor nobody else sees."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Return x * sigmoid(x)."""
        gate = x.sigmoid()
        out = x * gate
        ctx.save_for_backward(x, gate, out)
        return out

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """Return the gradient from all three."""
        x, gate, out = ctx.saved_tensors
        result: Tensor = grad * (gate + out * (1 - gate)) + 0.0 * x
        return result


class _DoubleInPlace(Function):
    """Writes its input and marks it dirty."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Double and shift x in place."""
        ctx.mark_dirty(x)
        x.mul_(2).add_(0.5)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """Scale the gradient by the sign of the written value too."""
        (x,) = ctx.saved_tensors
        result: Tensor = grad * 2 * (1 + 0.1 * x.sign())
        return result


class _Straight(Function):
    """Rounds, passes the gradient straight through, and gives a second, non-differentiable output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Return the rounded values and the mask of those that moved far."""
        rounded = (x * scale).round() / scale
        far = (rounded - x).abs() > 0.1
        ctx.mark_non_differentiable(far)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(far)
        ctx.scale = scale
        return rounded, far

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, None]:
        """Pass the gradient, damped where values moved far."""
        (far,) = ctx.saved_tensors
        return (None if grad is None else grad.masked_fill(far, 0.0) + 0.1 * grad * ctx.scale), None


class _InnerGraph(Function):
    """Runs autograd inside its backward, as reversible networks do."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor) -> Tensor:
        """Return sin(x) * x."""
        ctx.save_for_backward(x)
        return x.sin() * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """Rebuild the graph from the saved input and differentiate it."""
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            (result,) = torch.autograd.grad(x.sin() * x, x, grad)
        return result


def _custom(x: Tensor) -> Tensor:
    rounded, far = _Straight.apply(_Swish.apply(x), 4.0)
    return rounded * 1.5 + far.float() * x.sin()


def _custom_in_place(x: Tensor) -> Tensor:
    written: Tensor = _DoubleInPlace.apply(x * 1.0)
    inner: Tensor = _InnerGraph.apply(written)
    return inner.tanh() * written


class _Checkpointed(nn.Module):
    """A user's own checkpoint, with dropout inside and a nested checkpoint."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.reentrant = reentrant

    def _inner(self, x: Tensor) -> Tensor:
        return functional.dropout(self.second(x).relu(), 0.1)

    def _block(self, x: Tensor) -> Tensor:
        hidden = functional.dropout(self.first(x).sin(), 0.2) * x
        if self.reentrant:
            return self._inner(hidden)
        nested: Tensor = checkpoint(self._inner, hidden, use_reentrant=False)
        return nested

    def forward(self, x: Tensor) -> Tensor:
        """Run the block under checkpoint, between ops that are not."""
        inner: Tensor = checkpoint(self._block, x.tanh(), use_reentrant=self.reentrant)
        return inner.sigmoid() * x


def _keep_matmuls(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    keep = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


class _Selective(nn.Module):
    """Selective checkpointing, which brings its own dispatch modes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def _block(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x).sin().exp().clamp(max=2.0)
        return out

    def forward(self, x: Tensor) -> Tensor:
        """Checkpoint all but the matrix products."""
        out: Tensor = checkpoint(
            self._block,
            x.tanh(),
            use_reentrant=False,
            context_fn=lambda: create_selective_checkpoint_contexts(_keep_matmuls),
        )
        return out * x


def _own_hooks(x: Tensor) -> Tensor:
    """The user's own saved-tensor hooks inside a step, one of them lossy."""
    with torch.autograd.graph.save_on_cpu():
        x = x.sin() * x
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.bfloat16(), lambda t: t.float()):
        x = x.tanh() * 1.5
    return x.exp().clamp(max=3.0)


def _own_hooks_keep(x: Tensor) -> Tensor:
    """Hooks that keep what they get, and hooks that keep a copy."""
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach(), lambda t: t):
        x = x.cos() * x
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (t.clone(),), lambda packed: packed[0]):
        x = (x * x).sigmoid()
    return x * 2.0


def _gradient_hooks(x: Tensor) -> Tensor:
    """Hooks on gradients, one of which uses a tensor of forward."""
    hidden = x.sin()
    kept = hidden.detach()
    hidden.register_hook(lambda grad: grad * kept.abs().clamp(min=0.1))
    out = hidden * x
    out.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
    return out.exp().clamp(max=3.0)


class _ModuleHooks(nn.Module):
    """Forward and backward hooks on modules."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.linear.register_forward_hook(lambda module, args, out: out * 1.1)
        self.linear.register_full_backward_hook(lambda module, grads, outs: (grads[0] * 0.9,))
        self.linear.weight.register_hook(lambda grad: grad * 2)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the hooked layer."""
        return torch.tanh(self.linear(x))


def _detached(x: Tensor) -> Tensor:
    """Parts without gradient: a detached branch, a no_grad block, a re-enabled block."""
    with torch.no_grad():
        target = x.exp().clamp(max=2.0)
        with torch.enable_grad():
            slope = x.detach().requires_grad_()
            (gradient,) = torch.autograd.grad((slope.sin() * slope).sum(), slope)
    return (x.sin() * target + x.detach() * x * gradient).tanh()


def _vector(x: Tensor) -> Tensor:
    return (x.sin() * x).sum()


def _transforms(x: Tensor) -> Tensor:
    """Function transforms between ordinary ops."""
    before = x.tanh() * 1.5
    slope = torch.func.grad(_vector)(before)
    _, pull = torch.func.vjp(torch.sigmoid, before)
    (pulled,) = pull(slope)
    rowwise = torch.func.vmap(lambda row: row * row.softmax(0))(pulled)
    _, pushed = torch.func.jvp(torch.cos, (before,), (rowwise,))
    return (before * pushed).exp().clamp(max=3.0) + pulled.tanh()


class _Functional(nn.Module):
    """Per-sample gradients through functional_call, as in differential privacy and meta-learning."""

    def __init__(self) -> None:
        super().__init__()
        self.small = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Scale rows by the norm of their own gradient."""
        weights = dict(self.small.named_parameters())

        def row_loss(values: dict[str, Tensor], row: Tensor) -> Tensor:
            out: Tensor = torch.func.functional_call(self.small, values, (row,)).square().sum()
            return out

        grads = torch.func.vmap(torch.func.grad(row_loss), in_dims=(None, 0))(weights, x[:32])
        size = grads["weight"].square().sum((1, 2)).sqrt().mean()
        looked = torch.func.functional_call(self.small, weights, (x,))
        return x.sin() * size.tanh() + looked.sum(1, keepdim=True).tanh() * x


AUTOGRAD: tuple[Case, ...] = (
    body_case("custom-function", _custom, budgeted=True),
    body_case("custom-function-in-place", _custom_in_place, budgeted=True),
    body_case("checkpoint", module=lambda: _Checkpointed(reentrant=False), depth=2),
    body_case("checkpoint-reentrant", module=lambda: _Checkpointed(reentrant=True), depth=2),
    body_case("checkpoint-selective", module=_Selective, depth=2),
    body_case("own-hooks", _own_hooks),
    body_case("own-hooks-keep", _own_hooks_keep),
    body_case("gradient-hooks", _gradient_hooks),
    body_case("module-hooks", module=_ModuleHooks),
    body_case("detached", _detached),
    body_case("func-transforms", _transforms),
    body_case("functional-call", module=_Functional, depth=2),
)
