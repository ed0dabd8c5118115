"""A memento puts back what is below its roots, in the very same objects."""

from __future__ import annotations

import collections
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from lightning_offload.callbacks.tuning.snapshot import MAX_DATA_BYTES, Memento, RandomStates


class Meter:
    """Plain state of a user's own class."""

    def __init__(self) -> None:
        self.total = 0.0
        self.history: list[Any] = [1, [2, 3]]


class Slotted:
    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 1


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("hidden", torch.ones(2), persistent=False)
        self.meter, self.slotted = Meter(), Slotted()
        self.queue = collections.deque([1, 2], maxlen=2)
        self.names = {"a": {1}, "b": (torch.zeros(1), [1])}
        self.rng, self.noise = random.Random(1), np.random.default_rng(1)
        self.old = np.random.RandomState(1)
        self.draw = torch.Generator().manual_seed(1)
        self.array = np.arange(3)


def test_everything_that_a_step_may_change_is_put_back() -> None:
    """Tensors, containers, attributes, slots and generators have their contents again, and are the same objects."""
    model = Model()
    kept = {"weight": model.linear.weight, "hidden": model.hidden, "history": model.meter.history, "names": model.names}
    weight = model.linear.weight.detach().clone()
    memento = Memento([model])
    draws = [model.rng.random(), model.noise.random(), model.old.random(), torch.rand(1, generator=model.draw).item()]

    with torch.no_grad():
        model.linear.weight += 1
    model.linear(torch.ones(2)).sum().backward()
    model.hidden = model.hidden * 2
    model.meter.total, model.slotted.count = 5.0, 7
    model.meter.history[1].append(4)
    model.meter.history.append(5)
    model.queue.append(3)
    model.names["a"].add(2)
    model.names["b"][0].fill_(3)
    model.names["c"] = 1
    model.array += 1
    model.new = 1
    memento.restore()

    assert torch.equal(model.linear.weight, weight)
    assert model.linear.weight.grad is None
    assert model.hidden.tolist() == [1.0, 1.0]
    assert (model.meter.total, model.slotted.count) == (0.0, 1)
    assert model.meter.history == [1, [2, 3]]
    assert list(model.queue) == [1, 2]
    assert model.names["a"] == {1}
    assert list(model.names) == ["a", "b"]
    assert model.names["b"][0].item() == 0
    assert model.array.tolist() == [0, 1, 2]
    assert not hasattr(model, "new")
    now = {"weight": model.linear.weight, "hidden": model.hidden, "history": model.meter.history, "names": model.names}
    assert all(now[name] is kept[name] for name in kept)
    again = [model.rng.random(), model.noise.random(), model.old.random(), torch.rand(1, generator=model.draw).item()]
    assert again == draws


def test_it_can_be_restored_again_and_again() -> None:
    """Restoring does not use the memento up."""
    model = Model()
    memento = Memento([model])
    for _ in range(3):
        model.meter.history.append(1)
        model.hidden.add_(1)
        memento.restore()
        assert model.meter.history == [1, [2, 3]]
        assert model.hidden.tolist() == [1.0, 1.0]


def test_hooks_that_came_later_stay() -> None:
    """A hook is machinery of whoever put it there, such as a memory plugin."""
    model = Model()
    memento = Memento([model])
    handle = model.linear.register_forward_hook(lambda *_: None)
    memento.restore()
    assert len(model.linear._forward_hooks) == 1
    handle.remove()


def test_cycles_and_depth_are_no_trouble() -> None:
    """Objects may refer to one another, and lists may nest deeper than Python's stack."""
    model = Model()
    nested: list[Any] = []
    for _ in range(5000):
        nested = [nested]
    model.nested, model.self = nested, [model]
    memento = Memento([model])
    nested.append(1)
    memento.restore()
    assert len(nested) == 1


def test_large_tensors_of_a_data_set_are_not_copied() -> None:
    """They are taken as constant: copying the data would cost as much memory again."""

    class Data(Dataset[Any]):
        def __init__(self) -> None:
            self.small = torch.zeros(2)
            self.large = torch.zeros(MAX_DATA_BYTES)

    data = Data()
    memento = Memento([data])
    data.small += 1
    data.large += 1
    memento.restore()
    assert data.small.sum() == 0
    assert data.large.sum() == len(data.large)


def test_an_optimizer_that_the_model_holds_is_put_back() -> None:
    """Its state and its groups are those from before."""
    model = Model()
    model.optimizer = torch.optim.Adam(model.linear.parameters(), 0.1)
    memento = Memento([model])
    model.linear(torch.ones(2)).sum().backward()
    model.optimizer.step()
    model.optimizer.param_groups[0]["lr"] = 5.0
    memento.restore()
    assert model.optimizer.state == {}
    assert model.optimizer.param_groups[0]["lr"] == 0.1


def test_the_global_generators_go_on_from_where_they_were() -> None:
    """Python's, NumPy's and torch's give the same numbers once more."""

    def draw() -> tuple[float, float, float]:
        return random.random(), np.random.rand(), torch.rand(1).item()  # noqa: NPY002

    states = RandomStates.now()
    first = draw()
    draw()
    states.restore()
    assert draw() == first


def test_a_tensor_that_requires_grad_and_is_no_leaf_is_restored() -> None:
    """What a model keeps of its last step has a graph."""
    model = Model()
    model.last = model.linear(torch.ones(2))
    before = model.last.detach().clone()
    memento = Memento([model])
    with torch.no_grad():
        model.last.add_(1)
    memento.restore()
    assert torch.equal(model.last.detach(), before)


@pytest.mark.parametrize("kind", [collections.OrderedDict, lambda: collections.defaultdict(list), collections.Counter])
def test_kinds_of_dicts(kind: Any) -> None:
    """They keep their order and their type."""
    model = Model()
    model.table = kind()
    model.table["b"], model.table["a"] = 1, 2
    memento = Memento([model])
    del model.table["b"]
    model.table["c"] = 3
    memento.restore()
    assert list(model.table.items()) == [("b", 1), ("a", 2)]
