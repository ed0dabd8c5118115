"""Settings and captures that change between steps: the runtime follows plain PyTorch, or says what it cannot do."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_offload import MemoryPlugin, UnsupportedError, accelerators
from lightning_offload.runtime import executor
from lightning_offload.runtime.stream_lanes import StreamLanes
from tests.emulated_cuda.workloads import convolutional, images, same
from tests.gpu.device import TOLERANT

pytest.importorskip("emulated_cuda", reason="needs the emulated device: make test-emulated")

pytestmark = TOLERANT

NUM_STEPS = 10
POLICIES = ("all-swap", "all-recompute")


@pytest.fixture(autouse=True)
def asked_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have executors ask `torch.cuda` whether a graph is captured: there it can be pretended."""
    monkeypatch.setattr(executor, "capture_query", lambda device: accelerators.is_capturing)


class Captured(nn.Module):
    """A part of it is captured in some steps, forward alone."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, 64) for _ in range(4)])
        self.first = first
        self.index = 0

    def forward(self, x: Tensor) -> Tensor:
        for place, layer in enumerate(self.layers):
            with capturing() if place == 2 and self.index >= self.first else contextlib.nullcontext():
                x = torch.tanh(layer(x) * x)
        self.index += 1
        return x


@contextlib.contextmanager
def capturing() -> Iterator[None]:
    """As if a graph were captured: nothing may be waited for, and no side stream be asked for anything."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("this would become a part of the graph")

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True))
        for name in ("mark", "to_host", "to_device", "let_compute_wait", "settle", "new_event"):
            stack.enter_context(mock.patch.object(StreamLanes, name, refuse))
        yield


def trained(model: nn.Module, memory: MemoryPlugin | None) -> list[Tensor]:
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    model.cuda()
    seen = []
    for step in range(NUM_STEPS):
        x = torch.randn(128, 64, generator=torch.Generator().manual_seed(step)).cuda()
        with memory.step(x) if memory is not None else contextlib.nullcontext():
            loss = functional.mse_loss(model(x), x)
            loss.backward()
        seen += [loss.detach().cpu(), *(p.grad.cpu() for p in model.parameters() if p.grad is not None)]
        model.zero_grad()
    return seen


@pytest.mark.parametrize("first", [0, 6], ids=["in-all-steps", "later"])
@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_captured_runs_as_without_the_plugin(policy: str, first: int) -> None:
    """No copy, event or replay gets into a graph that is captured within a step; the bits are plain training's."""
    plain = trained(Captured(NUM_STEPS), None)
    with MemoryPlugin(budget=None, policy=policy) as memory:
        found = trained(Captured(first), memory)
        assert memory.report().num_steps == NUM_STEPS
    assert same(plain, found)


def test_a_backward_that_needs_copies_is_not_captured() -> None:
    """It is refused, with what to do instead; the next step is as any other."""
    plain = trained(Captured(NUM_STEPS), None)
    model = Captured(NUM_STEPS).cuda()
    x = torch.randn(128, 64, device="cuda")
    with MemoryPlugin(budget=None, policy="all-swap") as memory:
        for _ in range(5):
            with memory.step(x):
                model(x).sum().backward()
        with memory.step(x):
            loss = model(x).sum()
            with capturing(), pytest.raises(UnsupportedError, match="capture forward and backward together"):
                loss.backward()
        del loss
        assert same(plain, trained(Captured(NUM_STEPS), memory))


def test_no_step_begins_in_a_capture() -> None:
    """One clear error, before anything is asked of the device."""
    x = torch.ones(4, device="cuda")
    with MemoryPlugin(budget=None, device="cuda") as memory:
        with capturing(), pytest.raises(UnsupportedError, match="while a CUDA graph is captured"), memory.step(x):
            raise AssertionError("it began")
        with memory.step(x):
            assert memory.report().num_steps == 1


@pytest.fixture
def cudnn_benchmark() -> Iterator[None]:
    """Put back whether cuDNN tries its algorithms."""
    before = torch.backends.cudnn.benchmark
    yield
    torch.backends.cudnn.benchmark = before


def convolved(memory: MemoryPlugin | None) -> tuple[list[Tensor], list[str]]:
    """Losses and gradients, and the phases, of steps in whose midst cuDNN begins to try its algorithms, and ends it."""
    torch.manual_seed(0)
    model = convolutional().cuda()
    seen, phases = [], []
    for step in range(3 * NUM_STEPS // 2):
        torch.backends.cudnn.benchmark = 5 <= step < 10
        x, y = images(step)
        with memory.step(x, y) if memory is not None else contextlib.nullcontext():
            loss = functional.cross_entropy(model(x), y)
            loss.backward()
        seen += [loss.detach().cpu(), *(p.grad.cpu() for p in model.parameters() if p.grad is not None)]
        model.zero_grad()
        if memory is not None:
            phases.append(memory.report().phase)
    return seen, phases


@pytest.mark.usefixtures("cudnn_benchmark")
def test_steps_are_of_another_kind_while_cudnn_tries_algorithms() -> None:
    """No convolution may be replayed then, so that a plan from before would need more memory than it says."""
    plain, _ = convolved(None)
    with MemoryPlugin(budget=None, policy="all-recompute") as memory:
        found, phases = convolved(memory)
        assert len(memory.step_kinds) == 2
        graphs = [kind.graph for kind in memory._steps.cache.entries.values()]
    assert same(plain, found)
    assert phases[5] == "recording"
    assert phases[10] == "planned"
    replayable = [
        {op.replayable for op in graph.ops if op.name == "aten.convolution.default"}
        for graph in graphs
        if graph is not None
    ]
    assert sorted(replayable, key=str) == [{False}, {True}]
