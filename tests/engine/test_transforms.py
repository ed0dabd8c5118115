"""Transforms of `torch.func`, forward-mode and batched derivatives within a step change no bit and leave nothing."""

from __future__ import annotations

import contextlib
import functools
import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad, functional
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap

from lightning_offload import MemoryPlugin
from lightning_offload.plugins.module_steps import ModuleMemoryPlugin
from tests.engine.harness import snapshot
from tests.engine.live_tracker import LiveStorageTracker
from tests.shares import pairs

SIDE = 24
NUM_ROWS = 512
NUM_STEPS = 5
"""Two of them under the final plan."""


class Net(nn.Module):
    """Scales by a number, which forward-mode formulas pair with zeros that have no memory."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(SIDE, SIDE)
        self.last = nn.Linear(SIDE, SIDE)

    def forward(self, x: Tensor) -> Tensor:
        """Two layers with curvature."""
        out: Tensor = (self.last(self.first(x).tanh()) * 1.5).sin()
        return out

    def energy(self, x: Tensor) -> Tensor:
        """A number for a whole batch, or for one row."""
        return self(x).square().mean()


Loss = Callable[[Net, Tensor], Tensor]


class _Square(torch.autograd.Function):
    """Differentiable any number of times, by a backward that saves what it is given."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        """Square."""
        return x * x

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Save the input for either mode."""
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Another custom function, which saves the gradient."""
        return _Scale.apply(gradient, *ctx.saved_tensors)

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        """The derivative along a direction."""
        return 2 * ctx.saved_tensors[0] * tangent


class _Scale(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(gradient: Tensor, x: Tensor) -> Tensor:
        return 2 * gradient * x

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        before, x = ctx.saved_tensors
        return 2 * gradient * x, 2 * gradient * before


def _squares(tree: Any) -> Tensor:
    return torch.stack([part.square().sum() for part in torch.utils._pytree.tree_leaves(tree)]).sum()


def _weights(net: Net) -> dict[str, Tensor]:
    return dict(net.named_parameters())


def _jvp_of_weights(net: Net, x: Tensor) -> Tensor:
    weights = _weights(net)
    directions = {name: weight.detach().cos() for name, weight in weights.items()}
    return _squares(jvp(lambda w: functional_call(net, w, (x,)), (weights,), (directions,)))


def _dual(net: Net, x: Tensor) -> Tensor:
    hidden = net(x).sin()
    with forward_ad.dual_level():
        primal, tangent = forward_ad.unpack_dual(net(forward_ad.make_dual(hidden, hidden.cos() * 1.1)))
        return primal.sum() + tangent.square().sum()


def _dual_gradient(net: Net, x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, x.detach().cos())
        gradients = torch.autograd.grad(net.energy(dual.sin()), [dual, *net.parameters()], create_graph=True)
        return _squares([tuple(forward_ad.unpack_dual(g)) for g in gradients])


def _dual_backward(net: Net, x: Tensor) -> Tensor:
    def along_itself(gradient: Tensor) -> Tensor:
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(gradient, gradient * 2)
            return forward_ad.unpack_dual((dual * 1.5).sin()).tangent

    hidden = net(x)
    hidden.register_hook(along_itself)
    return net.energy(hidden)


def _zeros(net: Net, x: Tensor) -> Tensor:
    hidden = net(x)
    zeros = torch._efficientzerotensor(hidden.shape)
    return _squares((hidden * 1.5) * (zeros + hidden) + hidden * zeros)


def _batched_gradients(net: Net, x: Tensor) -> Tensor:
    hidden = net(x)[0]
    out = _Square.apply(net(hidden)).sin()  # type: ignore[no-untyped-call]
    rows = torch.eye(SIDE)
    return _squares(torch.autograd.grad(out, hidden, rows, is_grads_batched=True, create_graph=True))


def _laplacian(net: Net, x: Tensor) -> Tensor:
    values = vmap(lambda row: jacfwd(grad(net.energy))(row).trace())(x[:4])
    return _squares(values) + net.energy(x)


def _linearized(net: Net, x: Tensor) -> Tensor:
    out, push = linearize(net, x.detach())
    return net.energy(x) * (out.detach().sum() + push(x.detach()).detach().sum())


def _nested_reverse(net: Net, x: Tensor) -> Tensor:
    return _squares(jacrev(jacrev(net.energy))(x[0]))


TRANSFORMS: dict[str, Loss] = {
    "grad": lambda net, x: net.energy(x) + _squares(grad(net.energy)(x)),
    "vjp": lambda net, x: _squares(vjp(net, x)[1](x.cos())),
    "jvp": lambda net, x: _squares(jvp(net, (net(x).sigmoid(),), (x.cos(),))),
    "jvp-of-weights": _jvp_of_weights,
    "jvp-of-grad": lambda net, x: _squares(jvp(grad(net.energy), (x,), (x.cos(),))),
    "vmap": lambda net, x: _squares(vmap(net)(x)),
    "vmap-of-grad": lambda net, x: _squares(vmap(grad(net.energy))(x)),
    "vmap-of-hessian": lambda net, x: _squares(vmap(hessian(net.energy))(x[:3])),
    "jacrev": lambda net, x: _squares(jacrev(net, chunk_size=7)(x[0])),
    "jacrev-of-jacrev": _nested_reverse,
    "jacfwd": lambda net, x: _squares(jacfwd(net)(x[0])),
    "jacfwd-of-jacfwd": lambda net, x: _squares(jacfwd(jacfwd(net.energy))(x[0])),
    "hessian": lambda net, x: _squares(hessian(net.energy)(x[0])),
    "linearize": _linearized,
    "laplacian": _laplacian,
    "custom": lambda net, x: _squares(vmap(grad(lambda row: _Square.apply(net(row)).sum()))(x)),  # type: ignore[no-untyped-call]
    "custom-jvp": lambda net, x: _squares(jvp(lambda x: _Square.apply(net(x)), (x,), (x.cos(),))),  # type: ignore[no-untyped-call]
    "dual": _dual,
    "dual-gradient": _dual_gradient,
    "dual-in-backward": _dual_backward,
    "zeros": _zeros,
    "batched-gradients": _batched_gradients,
    "functional-jvp": lambda net, x: _squares(functional.jvp(net, x, x.cos(), create_graph=True)),
    "functional-hvp": lambda net, x: _squares(functional.hvp(net.energy, x, x.cos(), create_graph=True)),
    "functional-jacobian": lambda net, x: _squares(
        functional.jacobian(lambda x: _Square.apply(net(x)), x[0], create_graph=True, vectorize=True)  # type: ignore[no-untyped-call]
    ),
    "functional-hessian": lambda net, x: _squares(
        functional.hessian(net.energy, x[0], create_graph=True, vectorize=True)
    ),
    "functional-forward": lambda net, x: net.energy(x) * _squares(
        functional.jacobian(net, x[0], vectorize=True, strategy="forward-mode")
    ),
}  # fmt: skip


def _step(net: Net, loss_of: Loss, memory: MemoryPlugin | None) -> list[bytes]:
    x = torch.randn(NUM_ROWS, SIDE, requires_grad=True)
    with memory.step(x) if memory is not None else contextlib.nullcontext():
        loss = loss_of(net, x) + net.energy(net(x))
        loss.backward()  # type: ignore[no-untyped-call]
    gradients = [part.grad for part in (x, *net.parameters())]
    net.zero_grad()
    return [snapshot(part).data for part in (loss, *(g for g in gradients if g is not None))]


def _train(loss_of: Loss, memory: MemoryPlugin | None = None) -> tuple[list[list[bytes]], int]:
    """The losses and gradients of some steps, and the bytes that live on after them."""
    torch.manual_seed(0)
    net = Net()
    with LiveStorageTracker() as tracker, warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".torch.jit.script. is deprecated", DeprecationWarning)
        warnings.filterwarnings("ignore", "Attempted to insert a get_attr Node")  # torch's own, in `linearize`
        steps = [_step(net, loss_of, memory) for _ in range(NUM_STEPS)]
        if memory is not None:
            memory.detach()
        gc.collect()
        return steps, tracker.live_bytes


@functools.cache
def _plain(name: str) -> tuple[list[list[bytes]], int]:
    return _train(TRANSFORMS[name])


@pytest.mark.parametrize(("name", "policy"), pairs(list(TRANSFORMS), ["all-recompute", "all-swap"], every=2))
def test_transform_is_exact(name: str, policy: str) -> None:
    """Losses and gradients are plain PyTorch's in every step, and no memory is left."""
    expected = _plain(name)
    memory = MemoryPlugin(device="cpu", policy=policy)
    memory.attach()
    assert _train(TRANSFORMS[name], memory) == expected
    assert memory.report().num_mismatched == 0


@pytest.mark.parametrize("name", ["grad", "jvp", "vmap-of-hessian", "laplacian", "dual-gradient"])
def test_transform_within_a_budget_is_exact(name: str) -> None:
    """The same where the planner chooses; half way between what must be there and what plain training needs."""
    expected = _plain(name)
    memory = MemoryPlugin(device="cpu", policy="keep-all")
    memory.attach()
    assert _train(TRANSFORMS[name], memory) == expected
    floor_bytes, plain_bytes = memory.report().floor_bytes, memory.report().plain_peak_bytes
    assert floor_bytes is not None
    assert plain_bytes is not None
    memory = MemoryPlugin(device="cpu", budget=f"{(floor_bytes + plain_bytes) // 2}B")
    memory.attach()
    assert _train(TRANSFORMS[name], memory) == expected
    assert memory.report().swapped_bytes + memory.report().recomputed_bytes > 0


@pytest.mark.parametrize(("name", "policy"), pairs(list(TRANSFORMS), ["all-recompute", "all-swap", "auto"], every=2))
def test_a_followed_model_is_exact_in_transforms(name: str, policy: str) -> None:
    """Where forwards begin steps, those within a transform do not: it trains as plainly, and says so once."""
    expected, _ = _plain(name)
    torch.manual_seed(0)
    net = Net()
    memory = ModuleMemoryPlugin(budget="1GiB" if policy == "auto" else None, policy=policy)
    memory.follow(net, device="cpu")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        steps = [_step(net, TRANSFORMS[name], None) for _ in range(NUM_STEPS)]
        memory.detach()
    assert steps == expected
    assert sum("within a transform of torch.func" in str(warning.message) for warning in told) <= 1


def test_a_training_within_transforms_is_told_that_it_keeps_no_budget() -> None:
    """Gradients of each sample by vmap and grad, as differentially private training takes them."""
    torch.manual_seed(0)
    net = Net()
    memory = ModuleMemoryPlugin("1GiB")
    memory.follow(net, device="cpu")

    def loss_of(weights: dict[str, Tensor], row: Tensor) -> Tensor:
        out: Tensor = functional_call(net, weights, (row,))
        return out.square().mean()

    def gradients() -> dict[str, Tensor]:
        weights = {name: weight.detach() for name, weight in net.named_parameters()}
        found: dict[str, Tensor] = vmap(grad(loss_of), in_dims=(None, 0))(weights, x)
        return found

    x = torch.randn(NUM_ROWS, SIDE)
    with pytest.warns(UserWarning, match=r"within a transform of torch\.func .* no memory budget") as told:
        found = [gradients() for _ in range(3)]
    memory.detach()
    assert len(told) == 1
    plain = gradients()
    assert all(torch.equal(each[name], plain[name]) for each in found for name in plain)
    assert memory.report().phase == "idle"


class Interruption(Exception):
    """Raised by the tests' own loss."""


def _interrupted(net: Net, x: Tensor) -> Tensor:
    def raising(row: Tensor) -> Tensor:
        net.energy(row)
        raise Interruption

    return _squares(vmap(jacfwd(grad(raising)))(net(x)))


@pytest.mark.parametrize(("policy", "index"), pairs(["all-recompute", "all-swap"], [0, 1, 3], every=2))
def test_error_in_a_transform_leaves_nothing(policy: str, index: int) -> None:
    """A step that fails inside of transforms keeps no memory, and the steps around it are exact."""
    calls = iter(range(NUM_STEPS))

    def loss_of(net: Net, x: Tensor) -> Tensor:
        loss = TRANSFORMS["jvp-of-grad"](net, x)
        if next(calls) == index:
            with pytest.raises(Interruption):
                _interrupted(net, x)
            raise Interruption
        return loss

    def tolerant(net: Net, memory: MemoryPlugin | None) -> list[bytes]:
        try:
            return _step(net, loss_of, memory)
        except Interruption:
            return []

    torch.manual_seed(0)
    net = Net()
    with LiveStorageTracker() as tracker:
        memory = MemoryPlugin(device="cpu", policy=policy)
        memory.attach()
        steps = [tolerant(net, memory) for _ in range(NUM_STEPS)]
        memory.detach()
        gc.collect()
        live_bytes = tracker.live_bytes
    expected, left_bytes = _plain("jvp-of-grad")
    assert live_bytes == left_bytes
    assert steps == [[] if step == index else bits for step, bits in enumerate(expected)]
