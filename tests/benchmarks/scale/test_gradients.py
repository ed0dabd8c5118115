"""Gradients of recorded steps, and DDP's buckets: the sizes and the order that torch itself has."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.parallel import distributed

from benchmarks.scale.gradients import BUCKET_BYTES, FIRST_BUCKET_BYTES, Bucket, gradients_of, make_buckets
from examples.models import resnet50
from lightning_offload.graph import StepGraph
from lightning_offload.plugins.fake import record_fake_step
from lightning_offload.plugins.memory import MemoryPlugin
from tests.cli.models import small
from tests.graph.building import DEVICE, GraphBuilder

CARD = dataclasses.replace(DEVICE, kind="cuda", flops_per_second=1e12, memory_bytes_per_second=1e11)


class Tied(nn.Module):
    """A language model whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        scores: Tensor = self.head(self.norm(self.embedding(ids)))
        return scores


def wide() -> nn.Module:
    """Layers of very different sizes."""
    widths = (700, 3000, 2400, 3000, 100, 3000, 9)
    return nn.Sequential(*(nn.Sequential(nn.Linear(a, b), nn.ReLU()) for a, b in itertools.pairwise(widths)))


def image() -> Tensor:
    return torch.zeros(4, 3, 32, 32)


def ids() -> Tensor:
    return torch.zeros(4, 7, dtype=torch.int64)


def recorded(make: Callable[[], nn.Module], batch: Callable[[], Tensor], *, first: int = 0) -> StepGraph:
    """A step of a model, after some whose gradients are still there."""

    def build() -> tuple[nn.Module, Callable[[], None]]:
        model, x = make(), batch()
        for _ in range(first):
            model(x).sum().backward()
        return model, lambda: model(x).sum().backward()

    return record_fake_step(build, CARD)


def check_gradients(graph: StepGraph, model: nn.Module) -> None:
    """There is one for each parameter, in the order of backward."""
    found = gradients_of(graph)
    sizes = [p.numel() * p.element_size() for p in model.parameters()]
    assert sorted(gradient.num_bytes for gradient in found) == sorted(sizes)
    ready = [gradient.ready_op for gradient in found]
    assert ready == sorted(ready)
    assert graph.ops[ready[0]].phase == "backward"


@contextlib.contextmanager
def one_process() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(("make", "batch"), [(small, image), (Tied, ids)])
@pytest.mark.parametrize("first", [0, 2])
def test_one_gradient_for_each_parameter(
    make: Callable[[], nn.Module], batch: Callable[[], Tensor], first: int
) -> None:
    """Fresh and accumulated ones, shared parameters once; in backward, the last layer's first."""
    check_gradients(recorded(make, batch, first=first), make())


def test_ready_after_the_last_write() -> None:
    """The embedding that is the head too is ready when both of its parts are there: at the end of backward."""
    graph = recorded(Tied, ids)
    found = gradients_of(graph)
    assert found[-1].num_bytes == 50 * 16 * 4
    last_sum = max(i for i, op in enumerate(graph.ops) if op.phase == "backward" and op.name == "aten.add.Tensor")
    assert found[-1].ready_op >= last_sum


@pytest.mark.usefixtures("in_python")
@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_step_that_ran(set_to_none: bool) -> None:
    """A real recording shows the same gradients, new ones and those that are accumulated into."""
    model = small()
    with MemoryPlugin(budget="1GiB") as memory:
        for _ in range(2):
            with memory.step(x := image()):
                model(x).sum().backward()
            model.zero_grad(set_to_none=set_to_none)
        planned = memory.report().planned
    assert planned is not None
    check_gradients(planned.graph, model)


@pytest.mark.parametrize("is_view", [True, False])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_step_under_ddp(is_view: bool, set_to_none: bool) -> None:
    """What DDP's buckets are filled with is counted once, and ready when it is filled in."""
    with one_process():
        model = distributed.DistributedDataParallel(wide(), gradient_as_bucket_view=is_view)
        with MemoryPlugin(budget="2GiB") as memory:
            for _ in range(2):
                with memory.step(x := torch.zeros(2, 700)):
                    model(x).sum().backward()
                model.zero_grad(set_to_none=set_to_none)
            planned = memory.report().planned
    assert planned is not None
    check_gradients(planned.graph, model)


def test_backward_was_not_observed() -> None:
    """Its gradients are known by their size alone."""
    b = GraphBuilder()
    b.drop(b.make(10, b.given(100)))
    (found,) = gradients_of(b.build(gradient_bytes=100))
    assert (found.num_bytes, found.ready_op) == (100, -1)


def test_gradients_that_fill_a_bucket() -> None:
    """They count one by one, each ready when it is copied, however long the bucket is read after that."""
    b = GraphBuilder()
    weight, bucket = b.given(100), b.given(300)
    b.drop(b.make(10, weight))
    b.backward()
    for _ in range(3):
        fresh = b.make(100, weight)
        (bucket,) = b.op((fresh, bucket), (), writes=(bucket,), name="aten.copy_.default")
        b.drop(fresh)
    b.op((bucket,), (), writes=(bucket,), name="c10d.allreduce_.default")
    assert [(g.num_bytes, g.ready_op) for g in gradients_of(b.build())] == [(100, 2), (100, 4), (100, 6)]


def test_a_gradient_that_is_written_back() -> None:
    """Without views DDP copies buckets back at the end: a gradient is ready when it is filled in all the same."""
    b = GraphBuilder()
    weight, bucket = b.given(100), b.given(300)
    b.drop(b.make(10, weight))
    b.backward()
    fresh = b.make(100, weight)
    (bucket,) = b.op((fresh, bucket), (), writes=(bucket,), name="aten.copy_.default")
    b.op((bucket, fresh), (), writes=(fresh,), name="aten.copy_.default")
    assert [(g.num_bytes, g.ready_op) for g in gradients_of(b.build())] == [(100, 2)]


def test_sums() -> None:
    """Parts of a sum do not count, even if they live to the end; an old gradient that is added to twice counts once."""
    b = GraphBuilder()
    weight, old = b.given(100), b.given(70)
    b.drop(b.make(10, weight))
    b.backward()
    one, two = b.make(100, weight), b.make(100, weight)
    b.op((one, two), (100,), name="aten.add.Tensor")
    for _ in range(2):
        (old,) = b.op((b.make(70, weight), old), (), writes=(old,), name="aten.add_.Tensor")
    assert [(g.num_bytes, g.ready_op) for g in gradients_of(b.build())] == [(100, 3), (70, 7)]


def test_buffers_are_no_gradients() -> None:
    """What forward leaves behind, and what backward writes beside gradients, does not count."""
    b = GraphBuilder()
    weight, buffer = b.given(100), b.given(8)
    b.op((weight,), (), writes=(buffer,), name="aten.add_.Tensor")
    b.make(10, weight)
    b.backward()
    b.op((weight,), (), writes=(buffer,), name="aten.native_batch_norm.default")
    b.make(100, weight)
    (found,) = gradients_of(b.build())
    assert (found.num_bytes, found.ready_op) == (100, 3)


def test_a_step_without_backward_has_none() -> None:
    """There is nothing to exchange then."""
    b = GraphBuilder()
    b.make(10, b.given(100))
    assert gradients_of(b.build()) == ()


@given(st.lists(st.integers(1, 90), min_size=1, max_size=30), st.integers(1, 60), st.integers(1, 200))
def test_buckets_are_those_of_torch(sizes: list[int], first: int, cap: int) -> None:
    """The sizes that DDP's own assignment gives, for gradients in the order in which they became ready."""
    made = make_buckets([(size, float(i)) for i, size in enumerate(sizes)], first_bytes=first, cap_bytes=cap)
    tensors = [torch.empty(size, dtype=torch.uint8) for size in sizes]
    assigned, _ = dist._compute_bucket_assignment_by_size(tensors, [first, cap])
    assert [b.num_bytes for b in made] == [sum(sizes[i] for i in indices) for indices in assigned]
    assert [b.ready_seconds for b in made] == [float(indices[-1]) for indices in assigned]


@pytest.mark.parametrize(("make", "shape"), [(wide, (2, 700)), (resnet50, (2, 3, 32, 32))])
def test_buckets_of_ddp_itself(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    """One process under DDP: after the first step its buckets are those that a recorded step predicts."""
    assert FIRST_BUCKET_BYTES == dist._DEFAULT_FIRST_BUCKET_BYTES
    assert BUCKET_BYTES == distributed._DEFAULT_BUCKET_CAP_MB << 20
    graph = recorded(make, lambda: torch.zeros(shape))
    predicted = make_buckets([(g.num_bytes, float(g.ready_op)) for g in gradients_of(graph)])
    with one_process():
        model = distributed.DistributedDataParallel(make())
        for _ in range(3):
            model(torch.zeros(shape)).sum().backward()
        sizes = model._get_ddp_logging_data()["rebuilt_bucket_sizes"]
    assert [int(size) for size in sizes.split(",")] == [bucket.num_bytes for bucket in predicted]
    assert len(predicted) >= 4


def test_a_bucket_waits_for_its_last_gradient() -> None:
    """Whatever the order in which gradients are given."""
    assert make_buckets([(1, 5.0), (1, 3.0), (1, 4.0)], first_bytes=2, cap_bytes=2) == (
        Bucket(num_bytes=2, ready_seconds=5.0),
        Bucket(num_bytes=1, ready_seconds=5.0),
    )
    assert make_buckets([]) == ()
