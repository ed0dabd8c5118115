"""What runs without a budget although one was given is told once, with the fix; what is meant is not."""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from lightning_offload import MemoryPlugin
from lightning_offload.plugins import misuse
from lightning_offload.plugins.module_steps import ModuleMemoryPlugin
from tests.plugins.training import net, rows


@contextlib.contextmanager
def told(*parts: str) -> Iterator[None]:
    """Exactly these warnings come, in this order, each shown at a line of this file."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    found = [str(each.message) for each in caught]
    assert len(found) == len(parts), found
    assert all(part in message for part, message in zip(parts, found, strict=True)), found
    assert {each.filename for each in caught} <= {__file__}


def attached(model: nn.Module | None = None, **keywords: object) -> MemoryPlugin:
    memory = MemoryPlugin("1GiB", **keywords)  # type: ignore[arg-type]
    memory.attach(model)
    return memory


def test_a_step_that_is_not_entered() -> None:
    """A call without `with` is told once, and the loop trains on as it would."""
    model, batch = net(), rows(32)
    memory = attached(model)
    with told("write `with memory.step(batch):`"):
        memory.step(batch)
        model(batch).sum().backward()
        memory.step(batch)
    memory.detach()


def test_a_step_that_is_entered_later() -> None:
    """By an exit stack, or given to somebody else: nothing to tell, and the step counts."""
    model, batch = net(), rows(32)
    with told(), attached(model) as memory:
        scope = memory.step(batch)
        with contextlib.ExitStack() as stack:
            stack.enter_context(scope)
            model(batch).sum().backward()
        del scope
        gc.collect()
        assert memory.report().num_steps == 1


@pytest.mark.parametrize("is_known", [True, False], ids=["model known", "model unknown"])
def test_training_without_a_step(is_known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """An optimizer that steps before any step of the plugin is told of, once; an optimizer of another model is not."""
    model, other, batch = net(), nn.Linear(3, 3), rows(32)
    monkeypatch.setattr(misuse._Steps, "num_begun", 0)  # other plugins' steps, of which an unknown model may be part
    memory = attached(model if is_known else None)
    if is_known:
        with told():
            torch.optim.SGD(other.parameters(), 0.1).step()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with told("an optimizer stepped, but no step ran under the plugin"):
        for _ in range(2):
            model(batch).sum().backward()
            optimizer.step()
    memory.detach()


def test_a_step_within_a_closure() -> None:
    """LBFGS and Lightning run the training step inside the optimizer's: nothing to tell."""
    model, batch = net(), rows(32)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
    with told(), attached(model) as memory:

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            with memory.step(batch):
                loss = model(batch).square().mean()
                loss.backward()
            return loss

        optimizer.step(closure)


def test_a_plugin_that_was_never_attached() -> None:
    """Its steps have no effect; after a detach that is meant, and so it is where it is switched off."""
    model, batch = net(), rows(32)
    memory = MemoryPlugin("1GiB")
    with told("the plugin was not attached: put `with memory:`"):
        for _ in range(2):
            with memory.step(batch):
                model(batch).sum().backward()
    with told():
        with attached(model) as memory:
            pass
        with memory.step(batch):
            model(batch).sum().backward()
        with MemoryPlugin("1GiB", enabled=False).step(batch):
            model(batch).sum().backward()


def test_two_plugins() -> None:
    """The inner one has no effect; a step within another of the same plugin is part of that."""
    model, batch = net(), rows(32)
    with attached(model) as outer, attached(model) as inner:
        with told("has no effect, because its steps are within those of another one"):
            for _ in range(2):
                with outer.step(batch), inner.step(batch):
                    model(batch).sum().backward()
        with told(), outer.step(batch), outer.step(batch):
            model(batch).sum().backward()
        with told(), outer.step(batch), torch.no_grad(), inner.step(batch):
            model(batch)
        assert (outer.report().num_steps, inner.report().num_steps) == (4, 0)


def test_a_plugin_beside_one_that_follows_the_model() -> None:
    """As it is where a loop keeps its steps after its model was given to an adapter."""
    model, batch = net(), rows(32)
    memory = ModuleMemoryPlugin("1GiB")
    memory.follow(model)
    mine = attached(model)
    with warnings.catch_warnings(record=True) as caught, mine.step(batch):  # the outer one serves
        warnings.simplefilter("always")
        model(batch).sum().backward()
    assert ["strategy.memory, callback.memory" in str(each.message) for each in caught] == [True]
    memory.detach()
    mine.detach()


def test_a_pattern_that_matches_nothing() -> None:
    """It is echoed with names that there are; one that matches is not told of."""
    model, batch = net(), rows(32)
    with attached(model, keep=["blocks.3.*", "nothing_here", "blocks"]) as memory:
        with told("keep=['nothing_here', 'blocks'] matches no module that saves a tensor in this step"):
            for _ in range(3):
                with memory.step(batch):
                    model(batch).sum().backward()
        kept = memory.report().kept_bytes
    assert kept > 0
    with told(), attached(model, keep="blocks.*") as memory:
        for _ in range(3):
            with memory.step(batch):
                model(batch).sum().backward()
