"""DDP's gradient buckets and its own work around forward, in a process group of one process."""

from __future__ import annotations

import contextlib
import gc
import pickle
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_offload import MemoryPlugin
from lightning_offload.plugins.data_parallel import (
    GradientBuckets,
    InSync,
    WithoutSync,
    num_local_ranks,
    run_unseen_around_forward,
)
from lightning_offload.plugins.module_steps import ModuleMemoryPlugin
from lightning_offload.plugins.persistent import PersistentState
from lightning_offload.plugins.shape_families import shape_of
from lightning_offload.runtime.hooks import StepMode, bypass_mode

CPU = torch.device("cpu")


@pytest.fixture(autouse=True, scope="module")
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def net() -> nn.Module:
    """Two layers of 440 and 88 bytes with a norm that has buffers."""
    return nn.Sequential(nn.Linear(10, 10), nn.BatchNorm1d(10, affine=False), nn.Linear(10, 2))


def wrapped(**keywords: Any) -> tuple[DistributedDataParallel, GradientBuckets]:
    """A model under DDP, and its buckets."""
    buckets, module = GradientBuckets(), net()
    with buckets.noted():
        model = DistributedDataParallel(module, **keywords)
    run_unseen_around_forward(model, buckets)
    return model, buckets


def train(model: nn.Module) -> None:
    """One forward and backward."""
    model(torch.ones(3, 10)).sum().backward()


def _wait_until(holds: Callable[[], bool]) -> None:
    """A thread of gloo's may hold what it reduced for a moment after the one that waits for it was told."""
    end = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.001)


@pytest.mark.parametrize("cap_mb", [25, 0.0001])
def test_buckets_are_as_large_as_the_gradients(cap_mb: float) -> None:
    """One or several, they hold each gradient once, and what DDP itself says of their sizes agrees."""
    model, buckets = wrapped(bucket_cap_mb=cap_mb)
    told = [int(size) for size in str(model._get_ddp_logging_data()["bucket_sizes"]).split(",")]
    assert sorted(buckets.sizes().values()) == sorted(told)
    assert sum(told) == 528
    assert buckets.sizes(CPU) == buckets.sizes()
    assert buckets.sizes(torch.device("cuda", 0)) == {}


def test_buckets_die_with_the_model() -> None:
    """They are known by weak reference."""
    model, buckets = wrapped()
    del model
    assert buckets.sizes() == {}


def test_new_layout_after_the_first_backward() -> None:
    """DDP replaces its buckets before the second forward, once, and a step that used the old ones is told apart."""
    model, buckets = wrapped()
    old = {key: ref for key, ref in buckets._made.items() if key in buckets.sizes()}
    train(model)
    assert buckets.version == 0
    train(model)
    assert buckets.version == 1
    _wait_until(lambda: buckets.are_gone_from(old))
    assert sum(buckets.sizes().values()) == 528
    assert not buckets.are_gone_from({})
    train(model)
    assert buckets.version == 1
    assert model._get_ddp_logging_data()["has_rebuilt_buckets"] == 1


def test_no_layout_without_gradients() -> None:
    """Where DDP's forward would not lay its buckets out anew, nothing happens."""
    model, buckets = wrapped()
    train(model)
    with torch.no_grad():
        model(torch.ones(3, 10))
    assert buckets.version == 0


def test_a_layout_is_heard_of_by_every_plugin() -> None:
    """Two that have to do with one model know its buckets both; one that is gone hears of nothing."""
    model, buckets = wrapped()
    others = [GradientBuckets(), GradientBuckets()]
    undo = [run_unseen_around_forward(model, other) for other in others]
    undo[1]()
    train(model)
    train(model)
    assert buckets.version == others[0].version == 1
    assert sum(buckets.sizes().values()) == sum(others[0].sizes().values()) == 528
    assert others[1].version == 0
    assert type(model) is not DistributedDataParallel


@pytest.mark.parametrize("views", [True, False])
def test_buckets_count_once(views: bool) -> None:
    """They are among what is on the device; gradients that are views of them are not counted again."""
    model, buckets = wrapped(gradient_as_bucket_view=views)
    state = PersistentState(lambda parameters: None)
    state.data_parallel.buckets = buckets
    state.attach(model)
    try:
        parameters, buffers = 528, 2 * 40 + 8
        found = state.storages(CPU)
        assert (
            sum(found[tensor.untyped_storage()._cdata].nbytes() for tensor in state.tensors()) == parameters + buffers
        )
        assert sum(found[key].nbytes() for key in buckets.sizes()) == 528
        train(model)
        assert sum(state.gradients().values()) == (0 if views else 528)
        del found  # the storages of the buckets before
        train(model)
        assert state.version == 1
        _wait_until(lambda: sum(state.storages(CPU)[key].nbytes() for key in buckets.sizes()) == 528)
    finally:
        state.detach()


class Seen(TorchDispatchMode):
    """Notes the ops that run while our own are not hidden."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not bypass_mode.depth:
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("keywords", [{}, {"find_unused_parameters": True}, {"static_graph": True}], ids=str)
def test_forward_is_the_models_own(keywords: dict[str, Any]) -> None:
    """What is seen of forward under DDP, in its first step and later, is what is seen without it."""

    def ops_of(model: nn.Module) -> list[str]:
        with Seen() as seen:
            out = model(torch.ones(3, 10))
        out.sum().backward()
        return [name for name in seen.names if not name.startswith("profiler.")]

    plain = ops_of(net())
    model, _ = wrapped(**keywords)
    for _ in range(3):
        assert ops_of(model) == plain


def test_kinds_of_step() -> None:
    """A step that all-reduces gradients and one that only accumulates them have a plan each."""
    x = torch.ones(2)
    assert shape_of((x, InSync())).signature != shape_of((x, WithoutSync())).signature
    assert shape_of((x, InSync())).signature == shape_of((x, InSync())).signature


NUM_PARAMETERS = 4
"""Parameters of `net`: with unused ones looked for, DDP keeps a map of them, 4 bytes each, twice on a CPU."""


def with_strategy(module: nn.Module, keywords: dict[str, Any], memory: MemoryPlugin) -> DistributedDataParallel:
    """Wrapped under the plugin's eyes, as by `DDPOffloadStrategy`."""
    memory.attach(module)
    model = memory.data_parallel.construct(DistributedDataParallel, module, **keywords)
    assert isinstance(model, DistributedDataParallel)
    memory.data_parallel.called = model
    run_unseen_around_forward(model, memory.data_parallel.buckets)
    return model


def with_wrapper(module: nn.Module, keywords: dict[str, Any], memory: MemoryPlugin) -> DistributedDataParallel:
    """Wrapped before the plugin met it, and given to it, as in plain PyTorch."""
    model = DistributedDataParallel(module, **keywords)
    memory.attach(model)
    return model


def with_hooks(module: nn.Module, keywords: dict[str, Any], memory: MemoryPlugin) -> DistributedDataParallel:
    """Wrapped, and followed inside, as by the adapters."""
    model = DistributedDataParallel(module, **keywords)
    assert isinstance(memory, ModuleMemoryPlugin)
    memory.follow(module)
    return model


WAYS = [(MemoryPlugin, with_strategy), (MemoryPlugin, with_wrapper), (ModuleMemoryPlugin, with_hooks)]
KEYWORDS: list[dict[str, Any]] = [
    {}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": True}, {"static_graph": True},
    {"bucket_cap_mb": 0.0001},
]  # fmt: skip


def steps_of(model: DistributedDataParallel, memory: MemoryPlugin | None) -> Iterator[list[bytes]]:
    """Gradients and buffers after each of twelve backwards, of which every third all-reduces."""
    for i in range(12):
        x = torch.arange(30.0).reshape(3, 10) * (i + 1)
        model.require_backward_grad_sync = i % 3 == 0
        explicit = memory is not None and not isinstance(memory, ModuleMemoryPlugin)
        with memory.step(x) if memory is not None and explicit else contextlib.nullcontext():
            model(x).square().sum().backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        assert len(gradients) == NUM_PARAMETERS
        copies = [tensor.numpy().tobytes() for tensor in (*gradients, *model.buffers())]
        del gradients  # views of buckets, which they would keep
        yield copies
        if i % 3 == 0:
            model.zero_grad()


@pytest.mark.parametrize("keywords", KEYWORDS, ids=str)
@pytest.mark.parametrize(("plugin", "way"), WAYS, ids=["strategy", "wrapper", "hooks"])
def test_plugin_counts_buckets(plugin: type[MemoryPlugin], way: Any, keywords: dict[str, Any]) -> None:
    """Buckets are in the plan of each kind of step, however the plugin meets them, and all is exact."""
    memory = plugin("1GiB", policy="all-swap")
    torch.manual_seed(1)
    expected = list(steps_of(DistributedDataParallel(net(), **keywords), None))
    gc.collect()
    torch.manual_seed(1)
    model = way(net(), keywords, memory)
    persistent = 3 * 528 + 88 + 120  # parameters, buckets and accumulated gradients; buffers, inputs
    finds_unused = not keywords.keys().isdisjoint({"find_unused_parameters", "static_graph"})
    beside = 2 * 4 * NUM_PARAMETERS + 24 if finds_unused else 0  # DDP's maps of parameters, and its copy of the output
    beside += 4 if way is with_hooks else 0  # a scalar that was computed after the model's forward
    beside += 80  # the statistics that DDP broadcasts as one tensor, which gloo's thread may still hold
    beside += 40  # scalars of the step that was looked at, in whose place others are taken to be
    try:
        for i, (ours, theirs) in enumerate(zip(steps_of(model, memory), expected, strict=True)):
            assert ours == theirs
            planned = memory.report().planned
            if i > 5:
                assert planned is not None
                found = planned.graph.persistent_bytes + planned.graph.accumulated_bytes
                assert persistent <= found <= persistent + beside, i
        assert len(memory.step_kinds) == 2
    finally:
        memory.detach()
    assert not model._forward_pre_hooks
    assert way is with_strategy or type(model) is DistributedDataParallel


def test_steps_without_the_wrapper() -> None:
    """A model that is called without its wrapper takes kinds of step of its own, which all-reduce nothing."""
    memory = ModuleMemoryPlugin("1GiB", policy="all-swap")
    model = with_hooks(net(), {}, memory)
    try:
        for _ in range(4):
            train(model)
            train(model.module)
        assert len(memory.step_kinds) == 2
        assert all(kind.changes.num_deviations == 0 for kind in memory._steps.cache.entries.values())
    finally:
        memory.detach()


def test_wrapper_after_all() -> None:
    """Hiding DDP's own work leaves no trace on the wrapper, nor on its pickles, and does not keep it alive."""
    model, buckets = wrapped()
    run_as_usual = run_unseen_around_forward(model, buckets)
    assert isinstance(model, DistributedDataParallel)
    copied = pickle.loads(pickle.dumps(model))  # its default process group's
    assert type(copied) is DistributedDataParallel
    assert not hasattr(copied, "_offload_buckets")
    run_as_usual()
    assert not hasattr(model, "_offload_buckets")
    assert type(model) is DistributedDataParallel
    with MemoryPlugin("1GiB", module=model) as memory:
        with memory.step():
            train(model)
        reference = weakref.ref(model)
        del model
        assert reference() is None


def test_several_wrappers() -> None:
    """Each is given its own methods back."""
    models = [DistributedDataParallel(net()) for _ in range(2)]
    memory = MemoryPlugin("1GiB")
    for model in models:
        memory.attach(model)
    memory.detach()
    assert [type(model) for model in models] == 2 * [DistributedDataParallel]


def test_a_model_without_a_wrapper_after_one_with() -> None:
    """Its steps are of a kind of their own: they are not marked by a wrapper that was served before."""
    memory = MemoryPlugin("1GiB", policy="all-swap")
    model = DistributedDataParallel(net())
    for num_kinds, served in enumerate((model, net()), 1):
        memory.attach(served)
        with memory.step(torch.ones(1)):
            train(served)
        memory.detach()
        assert len(memory.step_kinds) == num_kinds


def test_buckets_of_an_earlier_fit() -> None:
    """A plugin that goes on with a new wrapper records its steps anew: they touched buckets that are gone."""
    memory = MemoryPlugin("1GiB", policy="all-swap")
    module = net()
    for _ in range(2):
        model = with_strategy(module, {}, memory)
        for _ in range(4):
            with memory.step():
                train(model)
            module.zero_grad()
        planned = memory.report().planned
        assert planned is not None
        assert planned.graph.persistent_bytes == 2 * 528 + 88  # parameters, buckets, buffers
        memory.detach()
        del model


def test_is_not_ours() -> None:
    """Noting allocations leaves no mode of ours behind."""
    with GradientBuckets().noted():
        assert torch.utils._python_dispatch._get_current_dispatch_mode() is not None
    assert not isinstance(torch.utils._python_dispatch._get_current_dispatch_mode(), StepMode)


@pytest.mark.parametrize(
    ("told", "world", "devices", "expected"),
    [
        ({}, 1, 8, 1),
        ({"LOCAL_WORLD_SIZE": "4"}, 16, 8, 4),
        ({"LOCAL_WORLD_SIZE": "", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, 16, 8, 2),
        ({"LOCAL_WORLD_SIZE": "none", "MPI_LOCALNRANKS": "0"}, 16, 8, 8),
        ({}, 4, 8, 4),
        ({}, 4, 1, 4),
        ({}, 4, 0, 4),
    ],
)
def test_ranks_of_this_host(
    told: dict[str, str], world: int, devices: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Launchers tell; else all ranks count, though no more than there are devices if several are in sight."""
    for name in ("LOCAL_WORLD_SIZE", "MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(dist, "is_initialized", lambda: world > 1)
    monkeypatch.setattr(dist, "get_world_size", lambda: world)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: devices)
    assert num_local_ranks() == expected


def test_a_class_of_others_before_ours_outlives_the_plugin() -> None:
    """It cannot be taken off from below another one; what is left of it does nothing but what DDP does."""
    model = DistributedDataParallel(net())
    plugin = MemoryPlugin("1GiB", module=model, policy="all-swap")
    with plugin:
        model.__class__ = type("Theirs", (type(model),), {})  # before the first step, in which DDP lays out its buckets
        x = torch.ones(3, 10)
        with plugin.step(x):
            model(x).sum().backward()
    for _ in range(3):
        train(model)
