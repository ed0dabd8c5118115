"""The work of ops, by exact counts: operations, bytes and what kind it is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_offload.capture import roofline
from lightning_offload.capture.roofline import Work
from lightning_offload.graph.catalog import device_spec
from lightning_offload.graph.work_kinds import WorkKind
from lightning_offload.plugins.fake import Step, record_fake
from tests.graph.building import DEVICE

CARD = dataclasses.replace(DEVICE, flops_per_second=1e12, memory_bytes_per_second=1e11)


def work_by_kind(module: nn.Module, run: Callable[[], Tensor]) -> dict[WorkKind, list[Work]]:
    """What a step does, without what has neither operations nor bytes."""

    def build() -> tuple[nn.Module, Step]:
        return module, lambda: run().sum().backward()

    found: dict[WorkKind, list[Work]] = {}
    for work in record_fake(build).work:
        if work.flops or work.num_bytes:
            found.setdefault(work.kind, []).append(work)
    return found


def flops(found: dict[WorkKind, list[Work]], kind: WorkKind) -> list[float]:
    """Operations of all work of a kind, in order."""
    return [work.flops for work in found.get(kind, [])]


@pytest.mark.parametrize(
    ("groups", "kind"),
    [(1, WorkKind.CONVOLUTION), (2, WorkKind.CONVOLUTION), (8, WorkKind.DEPTHWISE)],
)
def test_convolutions_and_their_groups(groups: int, kind: WorkKind) -> None:
    """Forward counts each weight at each place once; each gradient as much again, whatever the groups."""
    module = nn.Conv2d(8, 8, 3, padding=1, groups=groups, bias=False)
    x = torch.empty(2, 8, 5, 5, requires_grad=True)
    forward = 2.0 * 2 * 25 * 8 * (8 // groups) * 9
    assert flops(work_by_kind(module, lambda: module(x)), kind) == [forward, 2 * forward]


def test_convolution_that_needs_no_gradient_of_its_input() -> None:
    """The first layer of a network has one gradient."""
    module = nn.Conv2d(3, 8, 3, bias=False)
    forward = 2.0 * 4 * 36 * 8 * 3 * 9
    found = work_by_kind(module, lambda: module(torch.empty(4, 3, 8, 8)))
    assert flops(found, WorkKind.CONVOLUTION) == [forward, forward]


def test_products_of_a_linear_layer() -> None:
    """One in forward, two in backward."""
    module = nn.Linear(16, 32)
    x = torch.empty(8, 16, requires_grad=True)
    assert flops(work_by_kind(module, lambda: module(x)), WorkKind.MATMUL) == [2.0 * 8 * 16 * 32] * 3


@pytest.mark.parametrize("is_causal", [False, True])
def test_fused_attention(is_causal: bool) -> None:
    """Two products over all pairs in forward and five in backward; half of them where later tokens do not count."""
    query, key, value = (torch.empty(2, 4, 64, 16, requires_grad=True) for _ in range(3))
    module = nn.Identity()
    found = work_by_kind(module, lambda: F.scaled_dot_product_attention(query, key, value, is_causal=is_causal))
    pairs = 2 * 4 * 64 * 64 / (2 if is_causal else 1)
    assert flops(found, WorkKind.ATTENTION) == [2 * 2 * pairs * 16, 5 * 2 * pairs * 16]


@pytest.mark.parametrize(
    ("device", "dtype"),
    [("a100", torch.float32), ("a100", torch.bfloat16), ("h100", torch.bfloat16)],
    ids=["memory-efficient", "flash", "cuDNN"],
)
@pytest.mark.parametrize("is_causal", [False, True])
def test_fused_attention_on_cuda(device: str, dtype: torch.dtype, is_causal: bool) -> None:
    """Counted alike whatever the kernel: shares of the peak were fitted to such counts."""

    def build() -> tuple[nn.Module, Step]:
        query, key, value = (torch.empty(2, 4, 64, 16, dtype=dtype, requires_grad=True) for _ in range(3))
        run = lambda: F.scaled_dot_product_attention(query, key, value, is_causal=is_causal)  # noqa: E731
        return nn.Identity(), lambda: run().sum().backward()

    found = [work.flops for work in record_fake(build, device_spec(device)).work if work.kind is WorkKind.ATTENTION]
    pairs = 2 * 4 * 64 * 64 / (2 if is_causal else 1)
    assert found == [2 * 2 * pairs * 16, 5 * 2 * pairs * 16]


def test_positions_of_arguments_are_those_of_the_schemas() -> None:
    """Where each kernel of attention is told whether later tokens count."""
    names = [name for name in roofline._OWN_FLOPS if "dot_product" in name]
    assert len(names) == 8
    for name in names:
        arguments = [argument.name for argument in getattr(torch.ops.aten, name).default._schema.arguments]
        first, at = arguments.index("query"), arguments.index("is_causal")
        tensors = [torch.empty(1, 1, 4, 8, device="meta")] * (first + 3)
        rest = [None] * (at - len(tensors))
        plain, causal = (roofline._OWN_FLOPS[name]([*tensors, *rest, is_causal]) for is_causal in (False, True))
        assert plain == 2 * causal


def test_recurrent_layer() -> None:
    """Both matrices of a layer at each time step, and twice that in backward."""
    module = nn.LSTM(16, 32, batch_first=True)
    x = torch.empty(4, 10, 16)
    forward = 2.0 * 4 * 10 * (4 * 32 * 16 + 4 * 32 * 32)
    assert flops(work_by_kind(module, lambda: module(x)[0]), WorkKind.RECURRENT) == [forward, 2 * forward]


def test_what_memory_limits() -> None:
    """Norms, softmax and pooling reduce, activations do not; neither has operations that count."""
    module = nn.Sequential(nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Softmax(-1))
    x = torch.empty(2, 4, 8, 8, requires_grad=True)
    found = work_by_kind(module, lambda: module(x))
    assert set(found) == {WorkKind.REDUCTION, WorkKind.ELEMENTWISE}
    assert not any(work.flops for works in found.values() for work in works)


def test_seconds_are_the_devices() -> None:
    """At the peaks, the roofline; a calibrated device has its own."""
    work = Work(6e12, 10**11, WorkKind.MATMUL)
    assert work.seconds(CARD) == 6.0
    assert work.seconds(dataclasses.replace(CARD, matmul_efficiency=0.5, launch_seconds=1.0)) == 13.0
    assert Work(0.0, 0).seconds(dataclasses.replace(CARD, launch_seconds=1.0)) == 0
