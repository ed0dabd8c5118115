"""Calls of compiled models are steps, whoever compiled what, before or after it was followed."""

from __future__ import annotations

import contextlib
import copy
import pickle
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_offload.plugins.module_steps import ModuleMemoryPlugin

pytestmark = [  # the compiler's own, some of them raised by what it looks at while tracing
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]

NUM_STEPS = 5
Follow = Callable[[nn.Module], None]
Way = Callable[[Follow], nn.Module]


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.sin(self.up(x)))


def _body() -> nn.Sequential:
    return nn.Sequential(_Block(), _Block())


class _Parent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = _body(), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x))
        return out


def _compiled(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="aot_eager", fullgraph=True)  # type: ignore[return-value]


def _compile_in_place(module: nn.Module) -> None:
    module.compile(backend="aot_eager", fullgraph=True)


def _wrapper_before(follow: Follow) -> nn.Module:
    body = _body()
    wrapper = _compiled(body)
    follow(body)
    return wrapper


def _wrapper_after(follow: Follow) -> nn.Module:
    body = _body()
    follow(body)
    return _compiled(body)


def _wrapper_itself(follow: Follow) -> nn.Module:
    wrapper = _compiled(_body())
    follow(wrapper)
    return wrapper


def _in_place_before(follow: Follow) -> nn.Module:
    body = _body()
    _compile_in_place(body)
    follow(body)
    return body


def _in_place_after(follow: Follow) -> nn.Module:
    body = _body()
    follow(body)
    _compile_in_place(body)
    return body


def _by_block(follow: Follow) -> nn.Module:
    body = _body()
    follow(body)
    for block in body:
        _compile_in_place(block)
    return body


def _parent_of_it(follow: Follow) -> nn.Module:
    parent = _Parent()
    follow(parent.body)
    return _compiled(parent)


def _parent_in_place(follow: Follow) -> nn.Module:
    parent = _Parent()
    follow(parent.body)
    _compile_in_place(parent)
    return parent


def _within_a_compiled_one(follow: Follow) -> nn.Module:
    parent = _Parent()
    parent.body = _compiled(parent.body)  # type: ignore[assignment]
    follow(parent)
    return _compiled(parent)


WAYS = [
    _wrapper_before, _wrapper_after, _wrapper_itself, _in_place_before, _in_place_after, _by_block, _parent_of_it,
    _parent_in_place, _within_a_compiled_one,
]  # fmt: skip


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """Forget compiled code before and after, and leave torch as it was."""
    call, compile_ = torch._dynamo.OptimizedModule.__call__, torch.compile
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    assert torch._dynamo.OptimizedModule.__call__ is call
    assert torch.compile is compile_


def _train(way: Way, follow: Follow) -> tuple[list[Tensor], nn.Module]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = way(follow)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    losses = []
    for _ in range(NUM_STEPS):
        loss = model(torch.randn(64, 32)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    with torch.no_grad():
        losses.append(model(torch.ones(8, 32)))
    return [*losses, *(parameter.detach() for parameter in model.parameters())], model


@pytest.mark.parametrize("way", WAYS)
def test_each_call_is_a_step(way: Way) -> None:
    """As many steps as calls with gradients, under a plan from some on, and the same bits."""
    expected, _ = _train(way, lambda _: None)
    memory = ModuleMemoryPlugin("1GiB", policy="all-swap")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*memory budget.*")
        actual, _ = _train(way, lambda module: memory.follow(module, device="cpu"))
    report = memory.report()
    memory.detach()
    assert all(torch.equal(a, b) for a, b in zip(expected, actual, strict=True))
    assert report.num_steps == NUM_STEPS
    assert report.phase == "planned"
    assert report.swapped_bytes > 0


@pytest.mark.parametrize("way", [_wrapper_after, _in_place_after])
def test_copies_are_plain(way: Way) -> None:
    """A copy of a model that is followed and compiled is no step, nor is the model after the plugin is detached."""
    memory = ModuleMemoryPlugin("1GiB", policy="all-swap")
    with contextlib.ExitStack() as stack:
        stack.callback(memory.detach)
        _, model = _train(way, lambda module: memory.follow(module, device="cpu"))
        inner = getattr(model, "_orig_mod", model)
        for other in (copy.deepcopy(inner), pickle.loads(pickle.dumps(inner))):
            other(torch.ones(8, 32)).sum().backward()
        assert memory.report().num_steps == NUM_STEPS
    model(torch.ones(8, 32)).sum().backward()
    assert memory.report().num_steps == NUM_STEPS


def test_two_plugins_and_an_exception() -> None:
    """Each follows its own model; an exception in a compiled model closes its step; the other goes on."""
    one, other = (ModuleMemoryPlugin("1GiB", policy="all-swap") for _ in range(2))
    bodies = [_body(), _body()]
    one.follow(bodies[0], device="cpu")
    wrappers = [_compiled(body) for body in bodies]
    with pytest.raises(RuntimeError, match="31"):
        wrappers[0](torch.ones(8, 31))
    num_before = one.report().num_steps
    for wrapper in wrappers:
        wrapper(torch.ones(8, 32)).sum().backward()
    assert one.report().num_steps == num_before + 1
    one.detach()
    other.follow(bodies[1], device="cpu")
    for wrapper in wrappers:
        wrapper(torch.ones(8, 32)).sum().backward()
    assert (one.report().num_steps, other.report().num_steps) == (num_before + 1, 1)
    other.detach()


class _Checkpointed(nn.Module):
    """Each block compiled, and checkpointed: of modules of torch's own, whose frames its compiler leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(3))
        for block in self.blocks:
            block.compile(backend="aot_eager")

    def forward(self, x: Tensor) -> Tensor:
        """Residual blocks."""
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return x


def _with_compiled_loss(follow: Follow) -> nn.Module:
    """A loss beside the model that is compiled when the first step waits for its backward."""

    class Losing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = _body()
            self.loss = torch.compile(lambda y: y.square().mean() * torch.sigmoid(y), backend="aot_eager")
            follow(self.body)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.loss(self.body(x))
            return out

    return Losing()


def _with_checkpointed_blocks(follow: Follow) -> nn.Module:
    model = _Checkpointed()
    follow(model)
    return model


@pytest.mark.parametrize("policy", ["all-swap", "all-recompute", "auto"])
@pytest.mark.parametrize("way", [_with_compiled_loss, _with_checkpointed_blocks])
def test_what_is_compiled_around_and_within(way: Way, policy: str) -> None:
    """Neither what a compiler asks autograd is a backward of the step, nor is any code of ours compiled."""
    expected, _ = _train(way, lambda _: None)
    memory = ModuleMemoryPlugin("1GiB", policy=policy)
    actual, _ = _train(way, lambda module: memory.follow(module, device="cpu"))
    memory.detach()
    assert all(torch.equal(a, b) for a, b in zip(expected, actual, strict=True))
