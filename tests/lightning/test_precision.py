"""Grafting the mixin onto Lightning's precision plugins."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import (
    DeepSpeedPrecision,
    DoublePrecision,
    FSDPPrecision,
    HalfPrecision,
    MixedPrecision,
    Precision,
)

from lightning_offload import UnsupportedError
from lightning_offload.strategies.precision import OffloadPrecisionMixin, graft, ungraft


class RecordingMemory:
    """Takes the place of a MemoryPlugin and writes down what is asked of it."""

    def __init__(self) -> None:
        self.events: list[str] = []

    @contextlib.contextmanager
    def step(self, *inputs: Any) -> Iterator[None]:
        self.events.append(f"step{inputs} autocast={torch.is_autocast_enabled('cpu')}")
        try:
            yield
        finally:
            self.events.append("end")

    @contextlib.contextmanager
    def backward_scope(self) -> Iterator[None]:
        self.events.append("backward")
        yield


PLUGINS = [
    Precision(),
    MixedPrecision("bf16-mixed", "cpu"),
    HalfPrecision("bf16-true"),
    DoublePrecision(),
]


@pytest.mark.parametrize("plugin", PLUGINS, ids=lambda plugin: type(plugin).__name__)
def test_graft_keeps_the_identity(plugin: Any) -> None:
    """A grafted plugin is the same object, of its class, under its name, and can be restored."""
    cls, fields = type(plugin), dict(vars(plugin))
    graft(plugin, RecordingMemory())
    graft(plugin, RecordingMemory())  # once more changes nothing
    assert isinstance(plugin, cls)
    assert isinstance(plugin, OffloadPrecisionMixin)
    assert (type(plugin).__qualname__, type(plugin).__module__) == (cls.__qualname__, cls.__module__)
    ungraft(plugin)
    ungraft(plugin)
    assert type(plugin) is cls
    assert vars(plugin) == fields


def test_train_step_context_opens_a_step_around_autocast() -> None:
    """The step begins before autocast, with the noted inputs, which are forgotten afterwards."""
    plugin, memory = MixedPrecision("bf16-mixed", "cpu"), RecordingMemory()
    graft(plugin, memory)
    plugin.note_inputs(1, 2)
    with plugin.train_step_context():
        assert torch.is_autocast_enabled("cpu")
    with plugin.train_step_context():
        pass
    assert memory.events == ["step(1, 2) autocast=False", "end", "step() autocast=False", "end"]
    ungraft(plugin)


@pytest.mark.parametrize(
    "context", ["val_step_context", "test_step_context", "predict_step_context", "forward_context"]
)
def test_other_contexts_open_no_step(context: str) -> None:
    """Validation, test and prediction are not steps."""
    plugin, memory = Precision(), RecordingMemory()
    graft(plugin, memory)
    with getattr(plugin, context)():
        pass
    assert memory.events == []
    ungraft(plugin)


def test_exception_in_the_step_ends_it() -> None:
    """An exception passes through and ends the step."""
    plugin, memory = Precision(), RecordingMemory()
    graft(plugin, memory)
    with pytest.raises(KeyError), plugin.train_step_context():
        raise KeyError
    assert memory.events[-1] == "end"
    ungraft(plugin)


def test_own_subclass_keeps_its_overrides() -> None:
    """A user's own precision plugin is extended, not replaced."""

    class Mine(Precision):
        def backward(self, tensor: Any, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
            memory.events.append("mine")

    plugin, memory = Mine(), RecordingMemory()
    graft(plugin, memory)
    plugin.backward(None, None, None)
    assert memory.events == ["backward", "mine"]
    ungraft(plugin)


@pytest.mark.parametrize(
    ("cls", "name"), [(FSDPPrecision, "FSDP"), (DeepSpeedPrecision, "DeepSpeed")], ids=["fsdp", "deepspeed"]
)
def test_sharding_plugins_are_refused(cls: type, name: str) -> None:
    """A plugin of FSDP or DeepSpeed is one clear error."""
    plugin = cls.__new__(cls)  # DeepSpeed's needs its package to be built
    with pytest.raises(UnsupportedError, match=f"{name} is not supported"):
        graft(plugin, RecordingMemory())
    assert type(plugin) is cls
