"""Whatever training changes below known objects is put back bit for bit, in the very same objects."""

from __future__ import annotations

import collections
import functools
import math
import random
import weakref
from pathlib import Path
from typing import Any, ClassVar

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lightning_offload import MemoryPlugin
from lightning_offload.tuning.snapshot import MAX_DATA_BYTES, RandomStates, StateSnapshot, take_snapshot


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
        self.sparse = torch.eye(2).to_sparse()


def test_everything_that_a_step_may_change_is_put_back() -> None:
    """Tensors, containers, attributes, slots and generators have their contents again, and are the same objects."""
    model = Model()
    kept = {"weight": model.linear.weight, "hidden": model.hidden, "history": model.meter.history, "names": model.names}
    weight = model.linear.weight.detach().clone()
    snapshot = StateSnapshot([model])
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
    model.sparse.mul_(2)
    model.new = 1
    snapshot.restore()

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
    assert torch.equal(model.sparse.to_dense(), torch.eye(2))
    assert not hasattr(model, "new")
    now = {"weight": model.linear.weight, "hidden": model.hidden, "history": model.meter.history, "names": model.names}
    assert all(now[name] is kept[name] for name in kept)
    again = [model.rng.random(), model.noise.random(), model.old.random(), torch.rand(1, generator=model.draw).item()]
    assert again == draws


def test_hooks_that_came_later_stay() -> None:
    """Where it is told so, those of machinery, such as a memory plugin; the program's own do not."""
    model = Model()
    model.linear.register_forward_hook(own := lambda *_: None)
    snapshot = StateSnapshot([model], keeps_hooks=True)
    handle = model.linear.register_forward_hook(functools.partial(take_snapshot, []))
    for _ in range(2):
        model.linear.register_forward_hook(lambda *_: None)
        model.linear.register_forward_pre_hook(functools.partial(print, "mine"))
        model.linear.weight.register_hook(lambda gradient: gradient)
        model.linear.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    snapshot.restore()
    assert list(model.linear._forward_hooks.values()) == [own, model.linear._forward_hooks[handle.id]]
    assert not model.linear._forward_pre_hooks
    assert not model.linear.weight._backward_hooks
    assert not model.linear.weight._post_accumulate_grad_hooks
    handle.remove()


def test_what_functions_go_by_is_put_back() -> None:
    """The owner of a method, be it a builtin one, what a partial gives, and the variables of a closure."""
    numbers, generator, count = np.random.default_rng(3), torch.Generator().manual_seed(2), 0

    def draw() -> float:
        nonlocal count
        count += 1
        return float(torch.rand(1, generator=generator))

    class Holder:
        pass

    model = Holder()
    model.draw, model.normal, model.shuffle = (
        draw,
        numbers.normal,
        functools.partial(Tensor.uniform_, generator=generator),
    )
    snapshot = StateSnapshot([model])

    def drawn() -> list[float]:
        return [model.draw(), model.normal(), float(model.shuffle(torch.zeros(1))), float(count)]

    first = drawn()
    drawn()
    snapshot.restore()
    assert drawn() == first


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_what_is_as_it_was_is_not_written() -> None:
    """A tensor may be in memory that cannot be, or each of its elements in the same place."""
    model = Model()
    model.expanded = torch.ones(1).expand(4)
    model.mapped = torch.from_numpy(np.broadcast_to(np.float32([math.nan, -0.0]), (3, 2)))
    snapshot = StateSnapshot([model])
    snapshot.restore()
    with torch.no_grad():
        model.linear.weight += 1
    snapshot.restore()
    assert model.expanded.tolist() == [1.0] * 4


def test_a_scripted_module_and_one_of_another_class() -> None:
    """Tensors of a script are no attributes; a class that a hook has changed is put back."""
    model = Model()
    model.norm = torch.jit.script(torch.nn.BatchNorm1d(2))
    snapshot = StateSnapshot([model])
    before = model.norm.running_mean.clone()
    model.norm(torch.randn(5, 2))
    torch.nn.utils.parametrizations.weight_norm(model.linear)
    snapshot.restore()
    assert torch.equal(model.norm.running_mean, before)
    assert type(model.linear) is torch.nn.Linear
    assert model.linear(torch.ones(1, 2)).shape == (1, 2)


def test_cycles_and_depth_are_no_trouble() -> None:
    """Objects may refer to one another, and lists may nest deeper than Python's stack."""
    model = Model()
    nested: list[Any] = []
    for _ in range(5000):
        nested = [nested]
    model.nested, model.self = nested, [model]
    snapshot = StateSnapshot([model])
    nested.append(1)
    snapshot.restore()
    assert len(nested) == 1


def test_large_tensors_of_a_data_set_are_not_copied() -> None:
    """They are taken as constant: copying the data would cost as much memory again."""

    class Data(Dataset[Any]):
        def __init__(self) -> None:
            self.small = torch.zeros(2)
            self.large = torch.zeros(MAX_DATA_BYTES)
            self.array = np.zeros(MAX_DATA_BYTES)

    data = Data()
    snapshot = StateSnapshot([data])
    data.small += 1
    data.large += 1
    data.array += 1
    snapshot.restore()
    assert data.small.sum() == 0
    assert data.large.sum() == len(data.large)
    assert data.array.sum() == len(data.array)


def test_large_tensors_of_a_datamodule_are_not_copied() -> None:
    """It holds data as often as a data set does."""

    class Data(pl.LightningDataModule):
        def __init__(self) -> None:
            super().__init__()
            self.small = torch.zeros(2)
            self.arrays = {"x": np.zeros(MAX_DATA_BYTES)}

    data = Data()
    snapshot = StateSnapshot([data])
    data.small += 1
    data.arrays["x"] += 1
    snapshot.restore()
    assert data.small.sum() == 0
    assert data.arrays["x"].sum() == MAX_DATA_BYTES


def test_large_arrays_of_a_model_are_put_back(tmp_path: Path) -> None:
    """A replay buffer is state however large it is; a file that is mapped into memory is not."""
    model = Model()
    model.buffer = np.zeros(MAX_DATA_BYTES)  # type: ignore[assignment]
    model.file = np.memmap(tmp_path / "rows", np.uint8, "w+", shape=(4,))  # type: ignore[assignment]
    snapshot = StateSnapshot([model])
    model.buffer += 1
    model.file[:] = 1
    snapshot.restore()
    assert not model.buffer.any()
    assert model.file.all()


def test_layers_that_a_step_freezes_can_be_trained_again() -> None:
    """And those that it sets free are frozen."""
    model = Model()
    model.linear.bias.requires_grad_(False)
    snapshot = StateSnapshot([model])
    model.linear.weight.requires_grad_(False)
    model.linear.bias.requires_grad_(True)
    snapshot.restore()
    assert model.linear.weight.requires_grad
    assert not model.linear.bias.requires_grad


class Wrapping(Tensor):
    """A tensor of two, as a DTensor is one of its shard: it has no memory of its own."""

    @staticmethod
    def __new__(cls, *parts: Tensor) -> Wrapping:
        return Tensor._make_wrapper_subclass(cls, (2, *parts[0].shape))  # type: ignore[attr-defined,no-any-return]

    def __init__(self, *parts: Tensor) -> None:
        self.first, self.second = parts

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["first", "second"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], *_: Any) -> Wrapping:
        return Wrapping(*inner.values())

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: Any) -> Any:
        if func is torch.ops.aten.detach.default:
            raise RuntimeError(f"{func} has no sharding strategy")
        raise AssertionError(func)


def test_what_a_wrapping_tensor_is_made_of_is_put_back() -> None:
    """The parts are restored; the wrapper itself knows few ops, and need not know those."""
    wrapping = Wrapping(torch.zeros(3), torch.zeros(3))
    holder = Meter()
    holder.history = [wrapping]
    snapshot = StateSnapshot([holder])
    wrapping.first += 1
    wrapping.second -= 1
    snapshot.restore()
    assert not wrapping.first.any()
    assert not wrapping.second.any()


def test_a_tensor_that_requires_grad_and_is_no_leaf_is_restored() -> None:
    """What a model keeps of its last step has a graph."""
    model = Model()
    model.last = model.linear(torch.ones(2))
    before = model.last.detach().clone()
    snapshot = StateSnapshot([model])
    with torch.no_grad():
        model.last.add_(1)
    snapshot.restore()
    assert torch.equal(model.last.detach(), before)


@pytest.mark.parametrize("kind", [collections.OrderedDict, lambda: collections.defaultdict(list), collections.Counter])
def test_kinds_of_dicts(kind: Any) -> None:
    """They keep their order and their type."""
    model = Model()
    model.table = kind()
    model.table["b"], model.table["a"] = 1, 2
    snapshot = StateSnapshot([model])
    del model.table["b"]
    model.table["c"] = 3
    snapshot.restore()
    assert list(model.table.items()) == [("b", 1), ("a", 2)]


def test_gradients_take_no_memory_meanwhile() -> None:
    """A gradient is the same object again where it still lives, and another of the same bits where it was dropped."""
    first, second = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    (first * torch.tensor([1.0, 3.0]) + second).sum().backward()
    kept, dropped = first.grad, second.grad
    assert kept is not None
    assert dropped is not None
    snapshot = StateSnapshot([nn.ParameterList([first, second])])
    kept.zero_()
    gone, second.grad, dropped = weakref.ref(dropped), None, None
    assert gone() is None
    snapshot.restore()
    assert first.grad is kept
    assert kept.tolist() == [1.0, 3.0]
    assert second.grad is not None
    assert second.grad.tolist() == [1.0, 1.0]


def test_a_tensor_that_was_given_other_memory() -> None:
    """As a move to another device does it: it has its own memory again, and its contents."""
    model = nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    alias, before = model.weight.detach(), model.weight.detach().clone()
    snapshot = StateSnapshot([model])
    model.to(torch.float64)
    model.weight.data.zero_()
    snapshot.restore()
    assert model.weight.dtype == model.weight.grad.dtype == torch.float32
    assert model.weight.grad.tolist() == [[1.0, 1.0], [1.0, 1.0]]
    assert model.weight.is_set_to(alias)
    assert torch.equal(model.weight, before)


def test_the_global_generators_go_on_from_where_they_were() -> None:
    """Python's, NumPy's and torch's give the same numbers once more."""

    def draw() -> tuple[float, float, float]:
        return random.random(), np.random.rand(), torch.rand(1).item()  # noqa: NPY002

    states = RandomStates.now()
    first = draw()
    draw()
    states.restore()
    assert draw() == first


class Net(nn.Module):
    """Batch norm, dropout, a buffer that is not saved, and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
        self.register_buffer("mean", torch.zeros(8), persistent=False)
        self.num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        self.mean += x.mean(0)
        return self.net(x)


def setup() -> dict[str, Any]:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=100),
        "scaler": torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2),
        "loader": DataLoader(
            TensorDataset(torch.randn(32, 8)), 8, shuffle=True, generator=torch.Generator().manual_seed(4)
        ),
    }


def train(parts: dict[str, Any], num_epochs: int = 2) -> list[bytes]:
    model, optimizer, scaler = parts["model"], parts["optimizer"], parts["scaler"]
    seen = []
    for _ in range(num_epochs):
        for (x,) in parts["loader"]:
            x = x * random.random() + float(np.random.rand())  # noqa: NPY002
            loss = model(x).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            parts["scheduler"].step()
            seen += [loss.detach(), *(p.detach().clone() for p in model.parameters()), model.mean.clone()]
    seen += [torch.tensor(float(model.num_calls)), torch.tensor(scaler.get_scale())]
    return [tensor.numpy().tobytes() for tensor in seen]


def test_restored() -> None:
    """Training after a restore repeats itself: models, optimizers, schedulers, scalers, loaders, random numbers."""
    parts = setup()
    train(parts)  # in the middle of things, gradients and state there
    restore = take_snapshot([[parts["model"]], parts])
    first = train(parts)
    for _ in range(2):
        restore()
        assert train(parts) == first
    assert train(parts) != first


def test_restored_to_the_beginning() -> None:
    """State that an optimizer makes lazily, gradients, attributes and hooks that came later are gone."""
    parts = setup()
    model, optimizer = parts["model"], parts["optimizer"]
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    restore = take_snapshot(parts.values())
    train(parts)
    model.eval()
    model.added = 1
    model.register_forward_hook(lambda *_: None)
    model.forward = lambda x: x
    restore()
    assert optimizer.state_dict()["state"] == {}
    assert [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups] == groups
    assert all(p.grad is None for p in model.parameters())
    assert model.training
    assert not hasattr(model, "added")
    assert not model._forward_hooks
    assert "forward" not in vars(model)


def test_scaler_cut_short() -> None:
    """A gradient scaler that was interrupted between unscale and update can be used again."""
    parts = setup()
    restore = take_snapshot(parts.values())
    parts["scaler"].scale(parts["model"](torch.ones(4, 8)).sum()).backward()
    parts["scaler"].unscale_(parts["optimizer"])
    restore()
    parts["scaler"].scale(parts["model"](torch.ones(4, 8)).sum()).backward()
    parts["scaler"].unscale_(parts["optimizer"])


def test_plans_stay() -> None:
    """A memory plugin is left as it is: its plans are not training state."""
    memory = MemoryPlugin("1GiB")
    memory.load_state_dict = None  # type: ignore[assignment, method-assign]  # would fail if it were called
    take_snapshot([memory, {"memory": memory}])()


class Native:
    """Keeps its state where no attribute shows it."""

    __slots__ = ()
    state: ClassVar[list[int]] = [1]

    def state_dict(self) -> dict[str, Any]:
        return {"state": list(self.state)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state[:] = state["state"]


def test_state_that_only_the_object_can_tell() -> None:
    """It is asked for, and given back."""
    native = Native()
    restore = take_snapshot([native])
    native.state[0] = 2
    restore()
    assert native.state == [1]
