"""Steps within saved-tensor hooks that are not the plugin's run as without it: to the bit, and told once."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import graph
from torch.utils.checkpoint import checkpoint

from lightning_offload import MemoryPlugin
from lightning_offload.plugins.module_steps import ModuleMemoryPlugin

WIDTH, NUM_STEPS = 32, 5
TOLD = "within saved-tensor hooks that are not the plugin's"


class Residual(nn.Module):
    """What it saves has one shape throughout, so one saved tensor may be taken for another."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """A residual block."""
        out: Tensor = x + self.two(nn.functional.gelu(self.one(nn.functional.gelu(x))))
        return out


def _sampled(model: nn.Module, x: Tensor) -> Tensor:
    """Regions of a model and an op after it, as those who train samplers of diffusion models write them."""
    for _ in range(2):
        x = checkpoint(lambda z: model(z).sin(), x, use_reentrant=False)
    return x


def _now_and_then(model: nn.Module, x: Tensor) -> Tensor:
    """A forward by itself, and one within a checkpoint."""
    return _sampled(model, model(x))


def _compressed(model: nn.Module, x: Tensor) -> Tensor:
    with graph.saved_tensors_hooks(lambda t: t.bfloat16(), lambda t: t.float()):
        out: Tensor = model(x)
    return out


def _train(
    forward: Callable[[nn.Module, Tensor], Tensor], follow: Callable[[nn.Module], AbstractContextManager[object]]
) -> list[Tensor]:
    torch.manual_seed(0)
    model, found = Residual(), list[Tensor]()
    with follow(model):
        for step in range(NUM_STEPS):
            x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(step)).requires_grad_()
            forward(model, x).square().mean().backward()
            found += [parameter.grad.clone() for parameter in (*model.parameters(), x) if parameter.grad is not None]
            model.zero_grad()
    return found


def _following(policy: str) -> Callable[[nn.Module], AbstractContextManager[object]]:
    def follow(model: nn.Module) -> AbstractContextManager[object]:
        memory = ModuleMemoryPlugin(policy=policy)
        memory.follow(model)
        return memory

    return follow


@pytest.mark.parametrize("engine", ["native", "python"])
@pytest.mark.parametrize("policy", ["auto", "all-swap", "all-recompute"])
@pytest.mark.parametrize("forward", [_sampled, _now_and_then, _compressed])
def test_followed_models(
    forward: Callable[[nn.Module, Tensor], Tensor], policy: str, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hooks around a model's forward keep all that it saves: a checkpoint counts it when it runs it again."""
    if engine == "python":
        monkeypatch.setenv("LIGHTNING_OFFLOAD_ENGINE", "python")
    expected = _train(forward, lambda _: nullcontext())
    with pytest.warns(UserWarning, match=TOLD) as told:
        found = _train(forward, _following(policy))
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert len(told) == 1


def _mutating() -> AbstractContextManager[object]:
    return graph.allow_mutation_on_saved_tensors()


def _disabled() -> AbstractContextManager[object]:
    return graph.disable_saved_tensors_hooks("not here")


@pytest.mark.parametrize("around", [_mutating, _disabled, graph.save_on_cpu])
def test_steps(around: Callable[[], AbstractContextManager[object]]) -> None:
    """What surrounds a step stays in force in it."""
    found = []
    for memory in (None, MemoryPlugin(policy="all-recompute", device="cpu")):
        torch.manual_seed(0)
        weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            with memory or nullcontext():
                for step in range(NUM_STEPS):
                    x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(step))
                    with around(), memory.step(x) if memory is not None else nullcontext():
                        y = (x @ weight).tanh()
                        z = y.sin()
                        if around is _mutating:
                            y.mul_(2)
                        (y * 1 + z).square().mean().backward()
        assert weight.grad is not None
        found.append(weight.grad)
        assert sum(TOLD in str(each.message) for each in told) == (memory is not None)
    assert torch.equal(*found)
