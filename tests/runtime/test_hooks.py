"""Autograd's formulas that ask for modes give what they give without one, in a backward that is watched."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from lightning_offload import MemoryPlugin
from lightning_offload.runtime.hooks import StepMode, executing
from lightning_offload.tensors.observer import StepObserver
from lightning_offload.tensors.op_facts import OpFacts
from tests.runtime.executing import executor_for, plain, planned

MASK = torch.rand(4, 10, 30, generator=torch.Generator().manual_seed(1)) < 0.2
TARGET = (torch.arange(300).view(10, 30) % 7 / 7.0).bfloat16()
WEIGHT = 1.0 + torch.arange(30) / 7.0

FORMULAS: dict[str, Callable[[Tensor], Tensor]] = {
    "prod": lambda x: (x + 1.1).prod(1) + (x + 1.0).prod() * 1e-9,
    "cumprod": lambda x: (x + 1.1).cumprod(1),
    "max": lambda x: x.round(decimals=1).max(),
    "min": lambda x: x.round(decimals=1).min(),
    "median": lambda x: x.round(decimals=1).median(),
    "nanmedian": lambda x: x.round(decimals=1).nanmedian(),
    "masked-fill": lambda x: x.sin().expand(4, 10, 30).masked_fill(MASK, (x * x).mean()),
    "masked-fill-in-place": lambda x: x.sin().repeat(4, 1, 1).masked_fill_(MASK, (x * x).mean()),
    "det": lambda x: torch.linalg.det(x.view(3, 10, 10)),
    "eig": lambda x: torch.linalg.eig(x.view(3, 10, 10))[0].abs(),
    "eigh": lambda x: torch.linalg.eigh(x.view(3, 10, 10))[1].abs(),
    "matrix-exp": lambda x: torch.linalg.matrix_exp(x.view(3, 10, 10)),
    "householder": lambda x: torch.linalg.householder_product(x.t()[:, :8], x.mean(1)[:8]),
    "ormqr": lambda x: torch.ormqr(x.t()[:, :8], x.mean(1)[:8], x.t()),
    "binary-cross-entropy": lambda x: F.binary_cross_entropy(x.sigmoid(), (x * 0.5).sigmoid(), WEIGHT),
    "with-logits": lambda x: F.binary_cross_entropy_with_logits(x, TARGET.float(), WEIGHT, pos_weight=WEIGHT),
    "with-logits-in-bfloat16": lambda x: F.binary_cross_entropy_with_logits(x.bfloat16(), TARGET, WEIGHT).float(),
}


def leaf() -> Tensor:
    """A trainable matrix whose gradients round."""
    generator = torch.Generator().manual_seed(5)
    return (torch.randn(10, 30, generator=generator) * 0.5).requires_grad_()


@pytest.mark.parametrize("name", FORMULAS)
def test_formulas_that_ask_for_modes(name: str) -> None:
    """A backward whose ops are seen gives the bits of plain PyTorch."""
    x, formula = leaf(), FORMULAS[name]

    def step() -> Tensor:
        made = formula(x * 1.25)
        return (made * made.detach().cos()).sum()

    found, ran = planned(step, x, program=None)
    assert ran.executor.watches_backward
    assert found == plain(step, x)


@pytest.mark.parametrize("reentrant", [False, True])
def test_within_a_checkpoint(reentrant: bool) -> None:
    """Checkpointing has hooks of its own; the formulas under it are found all the same."""
    x = leaf()

    def step() -> Tensor:
        made = checkpoint(lambda t: (t + 1.1).prod(1).sin(), x * 1.25, use_reentrant=reentrant)
        assert isinstance(made, Tensor)
        return made.sum()

    assert planned(step, x, program=None)[0] == plain(step, x)


@pytest.mark.parametrize("policy", ["all-swap", "all-recompute"])
@pytest.mark.parametrize("how", ["reentrant-checkpoint", "backward-in-hook", "grad-in-hook"])
def test_within_a_backward_of_the_program_s_own(how: str, policy: str) -> None:
    """Where user code in backward is seen there are two modes, and such a node runs without both."""

    def inner(t: Tensor) -> Tensor:
        return ((t * 0.1 + 1.0).prod(1, keepdim=True) * 3.3).sin() + t

    def hook(gradient: Tensor) -> Tensor:
        with torch.enable_grad():
            t = gradient.detach().requires_grad_()
            if how == "grad-in-hook":
                return gradient + torch.autograd.grad(inner(t).sum(), t)[0]
            inner(t).sum().backward()
            assert t.grad is not None
            return gradient + t.grad

    def run(memory: MemoryPlugin | None) -> list[bytes]:
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(30, 64), torch.nn.Tanh(), torch.nn.Linear(64, 30))
        found = []
        with memory or contextlib.nullcontext():
            for _ in range(5):
                with memory.step() if memory is not None else contextlib.nullcontext():
                    out = model(leaf().detach())
                    if how == "reentrant-checkpoint":
                        out = checkpoint(inner, out, use_reentrant=True)
                    else:
                        out.register_hook(hook)
                    out.square().mean().backward()
                found += [p.grad.numpy().tobytes() for p in model.parameters() if p.grad is not None]
                model.zero_grad()
        return found

    assert run(MemoryPlugin(budget="64MiB", policy=policy)) == run(None)


def test_formulas_differentiated_again() -> None:
    """A gradient with a graph of its own has the bits of plain PyTorch, and so has its gradient."""
    x = leaf()

    def step() -> Tensor:
        y = x * 1.25
        (first,) = torch.autograd.grad(torch.linalg.det(y.view(3, 10, 10)).sum(), y, create_graph=True)
        (second,) = torch.autograd.grad((y + 1.1).prod(1).sum(), y, create_graph=True)
        return (first * second).sin().sum()

    assert planned(step, x, program=None)[0] == plain(step, x)


class _Names(StepObserver):
    """Notes the ops that it is told of."""

    def __init__(self) -> None:
        self.names: list[str] = []

    @override
    def on_op(self, facts: OpFacts, *args: object, **kwargs: object) -> None:
        self.names.append(facts.name)


def test_the_mode_is_off_for_such_nodes_alone() -> None:
    """The nodes before and after are seen, and the graph keeps no hook of ours."""
    x, observer = leaf(), _Names()
    with executing(executor_for(None, observer=observer)):
        loss = x.sin().prod(1).exp().sum()
        observer.names.clear()
        loss.backward(retain_graph=True)
    assert "aten.cos.default" in observer.names
    assert not any("prod" in name for name in observer.names)
    seen: list[str] = []

    def dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        seen.append(str(func))
        return func(*args, **kwargs)

    with StepMode(dispatch):
        loss.backward()
    assert any("cumprod" in name for name in seen)
