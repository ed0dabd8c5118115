"""Every training forward of a followed model is a step, whatever becomes of it."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from lightning_offload import PolicyError, UnsupportedError
from lightning_offload.plugins.memory import attached_plugins
from lightning_offload.plugins.module_steps import ModuleMemoryPlugin
from tests.plugins.training import Net, net, rows


@pytest.fixture
def memory() -> Iterator[ModuleMemoryPlugin]:
    plugin = ModuleMemoryPlugin("1GiB", policy="all-swap")
    yield plugin
    plugin.detach()


def is_clean() -> bool:
    """Whether no step is open: neither a mode nor hooks."""
    return (
        torch._C._len_torch_dispatch_stack() == 0 and torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    )


def backward(model: nn.Module) -> list[bytes]:
    model.zero_grad()
    model(rows(32)).square().mean().backward()
    return [p.grad.numpy().tobytes() for p in model.parameters() if p.grad is not None]


def test_steps(memory: ModuleMemoryPlugin) -> None:
    """Forwards with gradients are steps, forwards without are not, and gradients are the plain ones."""
    model, plain = net(), backward(net())
    memory.follow(model)
    assert attached_plugins() == [memory]
    for i in range(4):
        assert backward(model) == plain
        with torch.no_grad():
            model(rows(32))
        assert memory.report().num_steps == i + 1
        assert is_clean()
    assert memory.report().swapped_bytes > 0
    memory.detach()
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    assert attached_plugins() == []


def test_evaluation_mode(memory: ModuleMemoryPlugin) -> None:
    """A model in evaluation mode with gradients is another kind of step, with a plan of its own."""
    model = net()
    memory.follow(model)
    for _ in range(5):
        backward(model.train())
        backward(model.eval())
    assert memory.report().num_steps == 10
    assert len(memory.state_dict()["plans"]) == 2


class Recursive(nn.Module):
    """Calls itself, once with gradients and once without."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(256, 256)

    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        if depth == 0:
            return self.linear(x).sin()
        with torch.no_grad():
            scale = self(x, depth=0).std()
        return self(x, depth=depth - 1) * scale


def test_recursion(memory: ModuleMemoryPlugin) -> None:
    """A model that calls itself is one step, the outermost."""
    torch.manual_seed(0)
    model = Recursive()
    plain = backward(model)
    memory.follow(model)
    for _ in range(4):
        assert backward(model) == plain
        assert is_clean()
    assert memory.report().num_steps == 4


class Faulty(Net):
    """Raises what it is given after its forward."""

    error: BaseException | None = None

    def forward(self, x: Tensor) -> Tensor:
        result = super().forward(x)
        if self.error is not None:
            raise self.error
        return result


@pytest.mark.parametrize("error", [ValueError("x"), torch.OutOfMemoryError("CUDA out of memory.")], ids=["own", "oom"])
def test_errors(memory: ModuleMemoryPlugin, error: Exception) -> None:
    """An error in forward closes the step and reaches the caller; out of memory is explained."""
    model = Faulty()
    plain = backward(model)
    memory.follow(model)
    model.error = error
    with pytest.raises(type(error)) as caught:  # and no warning, which would be an error
        model(rows(32))
    assert is_clean()
    assert ("lightning-offload: budget 1.0 GiB" in str(caught.value)) == isinstance(error, torch.OutOfMemoryError)
    model.error = None
    assert backward(model) == plain


def test_error_being_handled(memory: ModuleMemoryPlugin) -> None:
    """A forward inside an `except` block succeeds or fails on its own account."""
    model = Faulty()
    plain = backward(model)
    memory.follow(model)
    try:
        raise KeyError("before")
    except KeyError:
        for _ in range(3):
            assert backward(model) == plain
    assert memory.report().num_steps == 3


@pytest.mark.parametrize("end", ["forward", "detach"])
def test_interrupt(memory: ModuleMemoryPlugin, end: str) -> None:
    """A step that Ctrl-C left open is closed by the next forward, even one without gradients, and by detach."""
    model = Faulty()
    plain = backward(model)
    memory.follow(model)
    model.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        model(rows(32))
    model.error = None
    if end == "detach":
        memory.detach()
    else:
        with torch.no_grad():
            model(rows(32))
    assert is_clean()
    assert backward(model) == plain


def test_refused_plan() -> None:
    """A budget that no plan can meet is an error of the forward that would need it, and leaves nothing open."""
    memory = ModuleMemoryPlugin("2MiB")
    model = net()
    memory.follow(model)
    model(rows(512)).sum().backward()
    with pytest.raises(ValueError, match="infeasible"):
        model(rows(512))
    assert is_clean()
    memory.detach()


def test_copies(memory: ModuleMemoryPlugin) -> None:
    """Copies and pickles of a model are not followed."""
    model = net()
    memory.follow(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        backward(other)
    assert memory.report().num_steps == 0


def test_gone(memory: ModuleMemoryPlugin) -> None:
    """The plugin is detached when the last of its models is gone."""
    models = [net(), net()]
    memory.follow(*models)
    models.pop()
    gc.collect()
    assert memory.num_followed == 1
    assert attached_plugins() == [memory]
    models.pop()
    gc.collect()
    assert memory.num_followed == 0
    assert attached_plugins() == []


def test_gone_in_another_thread() -> None:
    """A model may be collected in any thread, even one that detaching ends."""
    memory = ModuleMemoryPlugin("1GiB", policy="all-swap")
    models = [net()]
    memory.follow(*models)
    backward(models[0])
    thread = threading.Thread(target=models.clear)
    thread.start()
    thread.join(10)
    for each in threading.enumerate():
        if each.name == "lightning-offload-detach":
            each.join(10)
    assert attached_plugins() == []


def test_refused(memory: ModuleMemoryPlugin) -> None:
    """What is no module, is followed already or runs on several devices is refused with nothing hooked."""
    model = net()
    with pytest.raises(PolicyError, match="model=3 is an int"):
        memory.follow(model, 3)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="torchrun"):
        memory.follow(model, nn.DataParallel(net()))
    assert not model._forward_hooks
    memory.follow(model)
    with pytest.raises(UnsupportedError, match="detach"):
        ModuleMemoryPlugin().follow(model)


def test_models_of_one_plugin_that_are_given_as_much_are_told_apart() -> None:
    """An actor and its critic, each called with one tensor: forwards are foreseen by who runs them, and planned."""
    torch.manual_seed(0)
    actor = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2), torch.nn.Tanh())
    critic = torch.nn.Sequential(torch.nn.Linear(10, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    memory = ModuleMemoryPlugin("1GiB", policy="all-swap")
    memory.follow(actor, critic)
    try:
        for number in range(16):
            states, actions = torch.randn(32, 8), torch.rand(32, 2)
            critic(torch.cat([states, actions], 1)).square().mean().backward()
            is_planned = memory.phase == "planned"
            critic.zero_grad()
            (-critic(torch.cat([states, actor(states)], 1)).mean()).backward()
            if number >= 8:
                assert is_planned, number
                assert memory.phase == "planned", number
            actor.zero_grad()
            critic.zero_grad()
    finally:
        memory.detach()
