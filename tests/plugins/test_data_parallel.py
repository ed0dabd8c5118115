"""DDP's gradient buckets and its own work around forward, in a process group of one process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_offload import MemoryPlugin
from lightning_offload.plugins.data_parallel import GradientBuckets, InSync, WithoutSync, run_unseen_around_forward
from lightning_offload.plugins.persistent import PersistentState
from lightning_offload.plugins.signature import step_signature
from lightning_offload.runtime.step_mode import StepMode
from lightning_offload.runtime.switch import unseen

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
    return model, buckets


def train(model: nn.Module) -> None:
    """One forward and backward."""
    model(torch.ones(3, 10)).sum().backward()


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
    buckets.lay_out(model)
    assert buckets.version == 0
    old = {key: ref for key, ref in buckets._made.items() if key in buckets.sizes()}
    train(model)
    buckets.lay_out(model)
    assert buckets.version == 1
    assert sum(buckets.sizes().values()) == 528
    assert buckets.were_replaced_in(old)
    assert not buckets.were_replaced_in({})
    train(model)
    buckets.lay_out(model)
    assert buckets.version == 1
    assert model._get_ddp_logging_data()["has_rebuilt_buckets"] == 1


def test_no_layout_without_gradients() -> None:
    """Where DDP's forward would not lay its buckets out anew, nothing happens."""
    model, buckets = wrapped()
    train(model)
    with torch.no_grad():
        buckets.lay_out(model)
    assert buckets.version == 0


@pytest.mark.parametrize("views", [True, False])
def test_buckets_count_once(views: bool) -> None:
    """They lie beside a step that does not touch them; gradients that are views of them are not counted again."""
    model, buckets = wrapped(gradient_as_bucket_view=views)
    state = PersistentState(lambda parameters: None)
    state.buckets = buckets
    state.attach(model)
    try:
        parameters, buffers = 528, 2 * 40 + 8
        assert state.bytes_beside((), CPU) == parameters + buffers + 528
        assert state.bytes_beside(buckets.sizes(), CPU) == parameters + buffers
        train(model)
        assert sum(state.gradients().values()) == (0 if views else 528)
        buckets.lay_out(model)
        assert state.version == 1
    finally:
        state.detach()


class Seen(TorchDispatchMode):
    """Notes the ops that run while our own are not hidden."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not unseen.depth:
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
    run_unseen_around_forward(model)
    for _ in range(3):
        assert ops_of(model) == plain


def test_kinds_of_step() -> None:
    """A step that all-reduces gradients and one that only accumulates them have a plan each."""
    x = torch.ones(2)
    assert step_signature((x, InSync())) != step_signature((x, WithoutSync()))
    assert step_signature((x, InSync())) == step_signature((x, InSync()))


def test_plugin_counts_buckets() -> None:
    """A plugin's plan holds them persistent, before and after DDP lays them out anew, in each kind of step."""
    model, buckets = wrapped()
    run_unseen_around_forward(model)
    x = torch.ones(3, 10)
    persistent = 2 * 528 + 88 + x.nbytes  # parameters and buckets, buffers, inputs
    with MemoryPlugin("1GiB", module=model) as memory:
        memory.watch_buckets(buckets)
        for mark in (InSync(), InSync(), InSync(), WithoutSync(), WithoutSync()):
            memory.lay_out_buckets(model)
            model.require_backward_grad_sync = isinstance(mark, InSync)
            with memory.step(x, mark):
                model(x).sum().backward()
            planned = memory.report().planned
            model.zero_grad()
            assert planned is not None
            assert planned.graph.persistent_bytes == persistent, mark


def test_is_not_ours() -> None:
    """Noting allocations leaves no mode of ours behind."""
    with GradientBuckets().noted():
        assert torch.utils._python_dispatch._get_current_dispatch_mode() is not None
    assert not isinstance(torch.utils._python_dispatch._get_current_dispatch_mode(), StepMode)
