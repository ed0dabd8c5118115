"""The peak of an optimizer's step is counted on a CPU, and counting it changes nothing and leaves nothing."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from lightning_offload import MemoryPlugin
from tests.plugins.training import attached, net, rows

KIB = 1 << 10


class Outer(Optimizer):
    """An optimizer that calls another one within its step, after a copy of all weights."""

    def __init__(self, weights: Any) -> None:
        super().__init__(weights, {})
        self.inner = SGD(self.param_groups, lr=0.1, foreach=False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        copies = [p.clone() for group in self.param_groups for p in group["params"]]
        del copies
        self.inner.step()


@pytest.mark.parametrize("is_inside", [False, True])
def test_peak_of_an_optimizer_with_another_one_inside(is_inside: bool) -> None:
    """Is that of the outer one's whole step, in a training step or after it."""
    model, batch = net(), rows()
    with attached(model, policy="all-swap", budget="64MiB") as memory:
        optimizer = Outer(model.parameters())
        for _ in range(6):
            with memory.step(batch):
                model(batch).square().mean().backward()
                if is_inside:
                    optimizer.step()
            if not is_inside:
                optimizer.step()
            optimizer.zero_grad()
        report = memory.report()
    weights = sum(p.nbytes for p in model.parameters())
    used = sum(p.nbytes for name, p in model.named_parameters() if "unused" not in name)
    assert report.optimizer_peak_bytes is not None
    assert weights + used + weights <= report.optimizer_peak_bytes <= weights + used + weights + batch.nbytes + KIB


def test_an_optimizer_that_fails_leaves_nothing() -> None:
    """Its ops are not watched any more, and later figures are true."""
    model, batch = net(), rows()

    class Failing(Adam):
        def step(self, closure: Any = None) -> None:
            raise KeyError("on purpose")

    before = len(_get_current_dispatch_mode_stack())
    with attached(model, policy="all-swap", budget="64MiB") as memory:
        good, bad = SGD(model.parameters(), lr=0.1), Failing(model.parameters())
        for _ in range(5):
            with memory.step(batch):
                model(batch).square().mean().backward()
            with contextlib.suppress(KeyError):
                bad.step()
            good.zero_grad()
        with memory.step(batch):
            model(batch).square().mean().backward()
        good.step()
        assert memory.report().phase == "planned"
    assert len(_get_current_dispatch_mode_stack()) == before


class Products(nn.Module):
    """Autograd's formula for its last op computes otherwise under a dispatch mode."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        return (self.second(self.first(x).tanh()) * 0.3 + 1.0).prod(1)


def _products(seed: int) -> Products:
    torch.manual_seed(seed)
    return Products()


def _bits(model: nn.Module) -> list[bytes]:
    found = [*model.parameters(), *(p.grad for p in model.parameters() if p.grad is not None)]
    return [tensor.detach().numpy().tobytes() for tensor in found]


def _step(model: nn.Module, index: int, memory: MemoryPlugin | None) -> None:
    batch = torch.linspace(-1, 1, 32 * 16).view(32, 16) * (index + 1)
    with memory.step(batch) if memory is not None else contextlib.nullcontext():
        model(batch).square().mean().backward()


def _two_models(plugins: list[MemoryPlugin | None], models: list[Products]) -> list[bytes]:
    optimizers = [Adam(model.parameters(), foreach=False) for model in models]
    found = []
    for index in range(6):
        for model, optimizer, memory in zip(models, optimizers, plugins, strict=True):
            _step(model, index, memory)
            found += _bits(model)
            optimizer.step()
            assert _get_current_dispatch_mode_stack() == []
            optimizer.zero_grad()
    return found


def test_a_plugin_for_each_of_two_models() -> None:
    """Each hears of the other's optimizer; no mode is left, and all is exact."""
    expected = _two_models([None, None], [_products(1), _products(2)])
    models = [_products(1), _products(2)]
    with attached(models[0], budget="64MiB") as one, attached(models[1], budget="64MiB") as other:
        assert _two_models([one, other], models) == expected
        assert one.report().optimizer_peak_bytes is not None


def test_a_plugin_in_each_of_two_threads() -> None:
    """An optimizer's step in another thread is nobody else's, and all is exact."""
    expected, found = [_two_models([None], [_products(seed)]) for seed in (1, 2)], dict[int, list[bytes]]()
    with (
        attached(one := _products(1), budget="64MiB") as its_plugin,
        attached(other := _products(2), budget="64MiB") as others_plugin,
    ):

        def train(number: int, model: Products, memory: MemoryPlugin) -> None:
            found[number] = _two_models([memory], [model])

        jobs = [(0, one, its_plugin), (1, other, others_plugin)]
        threads = [threading.Thread(target=train, args=job) for job in jobs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [found[0], found[1]] == expected


class WithClosure(SGD):
    """Differentiates the model within its step."""

    def step(self, closure: Callable[[], Tensor]) -> None:  # type: ignore[override]
        self.zero_grad()
        with torch.enable_grad():
            closure()
        super().step()


def test_a_backward_inside_of_an_optimizers_step() -> None:
    """Is plain autograd's: nothing counts while it runs."""

    def train(model: Products, memory: MemoryPlugin | None) -> list[bytes]:
        optimizer, found = WithClosure(model.parameters(), lr=0.01), []
        for index in range(6):
            _step(model, index, memory)

            def closure() -> Tensor:
                loss = model(torch.ones(8, 16)).square().mean()
                loss.backward()
                return loss

            optimizer.step(closure)
            found += _bits(model)
            optimizer.zero_grad()
        return found

    expected, model = train(_products(1), None), _products(1)
    with attached(model, budget="64MiB") as memory:
        assert train(model, memory) == expected


class _UsersMode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_an_optimizer_that_fails_under_a_mode_of_the_users() -> None:
    """The user's mode comes off, as it went on; a gradient taken afterwards is plain autograd's."""

    class Failing(SGD):
        def step(self, closure: Any = None) -> None:
            raise KeyError("on purpose")

    def gradient() -> bytes:
        x = torch.linspace(0.5, 1.5, 350).view(7, 50).requires_grad_()
        (x.prod(1) * 3.3).sum().backward()
        assert x.grad is not None
        return x.grad.numpy().tobytes()

    expected, model = gradient(), _products(1)
    with attached(model, budget="64MiB") as memory:
        optimizer = Failing(model.parameters(), lr=0.1)
        for index in range(5):
            _step(model, index, memory)
            with pytest.raises(KeyError), _UsersMode() if index % 2 else contextlib.nullcontext():
                optimizer.step()
            assert gradient() == expected
            assert _get_current_dispatch_mode_stack() == []
