"""What a CPU's ops allocate within is in plans and figures, as the allocator itself tells from outside."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch._C._autograd import _profiler_enabled

from lightning_offload import MemoryPlugin
from lightning_offload.capture import workspace
from lightning_offload.errors import BudgetInfeasibleError
from lightning_offload.runtime.native import build
from tests.one_thread import one_thread as one_thread
from tests.shares import pairs

pytestmark = pytest.mark.workspaces
ENGINES = ("python", "native")
MIB = 1 << 20
STEPS = 9


class _Unet(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, width, 3, padding=1), nn.GroupNorm(4, width), nn.SiLU())
        self.down = nn.Sequential(nn.Conv2d(width, 2 * width, 3, 2, 1), nn.GroupNorm(4, 2 * width), nn.SiLU())
        self.up = nn.Conv2d(2 * width, width, 3, padding=1)
        self.last = nn.Conv2d(2 * width, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        beside = self.first(x)
        up = self.up(nn.functional.interpolate(self.down(beside), scale_factor=2.0))
        out: Tensor = self.last(torch.cat([beside, up], 1))
        return out


def _layers(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(*(part for layer in layers for part in (layer, nn.GELU())))


NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "unet": (_Unet, (4, 3, 32, 32)),
    "dilated": (lambda: _layers(*(nn.Conv2d(8, 8, 3, padding=2, dilation=2) for _ in range(4))), (8, 8, 32, 32)),
    "depthwise": (lambda: _layers(*(nn.Conv2d(16, 16, 3, padding=1, groups=16) for _ in range(4))), (8, 16, 32, 32)),
    "transposed": (lambda: _layers(*(nn.ConvTranspose2d(8, 8, 3, padding=1) for _ in range(4))), (8, 8, 32, 32)),
    "sequence": (lambda: _layers(*(nn.Conv1d(16, 16, 5, padding=2) for _ in range(4))), (8, 16, 512)),
    "double": (lambda: _layers(*(nn.Conv2d(8, 8, 3, padding=1) for _ in range(4))).double(), (4, 8, 32, 32)),
}
"""By name: a net, and the shape of a batch."""


def _train(
    name: str, budget: int | str | None, step_of: Callable[[int], contextlib.AbstractContextManager[None]]
) -> tuple[MemoryPlugin | None, list[Tensor]]:
    build_net, shape = NETS[name]
    torch.manual_seed(0)
    model = build_net()
    batch = torch.randn(shape, dtype=next(model.parameters()).dtype)
    memory = MemoryPlugin(budget=budget, module=model) if budget is not None else None
    with memory or contextlib.nullcontext():
        for index in range(STEPS):
            with step_of(index), memory.step(batch) if memory is not None else contextlib.nullcontext():
                model(batch).square().mean().backward()
            if index < STEPS - 1:
                model.zero_grad()
            if memory is not None:
                memory.report()
    return memory, [weight.grad for weight in model.parameters() if weight.grad is not None]


class _Outside:
    """The true peak of each step from some step on: what is there, and what torch's allocator gave since."""

    def __init__(self, name: str, first: int) -> None:
        self.peaks: list[int] = []
        self._first = first
        build_net, shape = NETS[name]
        weights = list(build_net().parameters())
        self._there = sum(weight.nbytes for weight in weights) + torch.empty(shape, dtype=weights[0].dtype).nbytes

    @contextlib.contextmanager
    def step(self, index: int) -> Iterator[None]:
        if index < self._first:
            yield
            return
        profiler = workspace._profiler()
        assert profiler is not None
        profiler.begin()
        yield
        now = peak = 0
        for events in profiler.end():
            for event in events:
                if event.kind() == "memory_alloc":
                    now += event.cpu_memory_usage()
                    peak = max(peak, now)
        self.peaks.append(self._there + peak)


@functools.cache
def _least_budget(name: str) -> int:
    """In whichever engine: it is the same in both."""
    budget = MIB
    for _ in range(8):
        try:
            _train(name, budget, lambda _: contextlib.nullcontext())
        except BudgetInfeasibleError as error:
            budget = error.floor_bytes
        else:
            return budget
    raise AssertionError("each smallest budget was too small for the next plan")


@functools.cache
def _plain_gradients(name: str) -> list[Tensor]:
    return _train(name, None, lambda _: contextlib.nullcontext())[1]


@pytest.mark.parametrize(("name", "engine"), pairs(list(NETS), ENGINES, every=2))
def test_the_allocators_own_peak_is_within_the_smallest_budget(
    name: str, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the page, in each step under the final plan; and the bits are plain's."""
    if engine == "native" and (why := build.why_not()):
        pytest.skip(f"no native core: {why}")
    monkeypatch.setenv("LIGHTNING_OFFLOAD_ENGINE", engine)
    expected, budget, outside = _plain_gradients(name), _least_budget(name), _Outside(name, first=6)
    memory, gradients = _train(name, budget, outside.step)
    assert memory is not None
    report = memory.report()
    assert report.phase == "planned"
    assert max(outside.peaks) <= budget + workspace._PAGE_BYTES
    assert report.swapped_bytes + report.recomputed_bytes > 0
    assert all(map(torch.equal, gradients, expected))


@pytest.mark.parametrize("name", ["unet", "transposed"])
def test_figures_are_those_of_the_allocator(name: str) -> None:
    """A step that keeps everything needs what the report says of it, workspaces among it."""
    outside = _Outside(name, first=6)
    memory, _ = _train(name, "256MiB", outside.step)
    assert memory is not None
    report = memory.report()
    assert abs(max(outside.peaks) - (report.plain_peak_bytes or 0)) <= workspace._PAGE_BYTES
    assert report.measured_peak_bytes == report.plain_peak_bytes


def test_planned_steps_go_without_the_profiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is on around the ops of the first steps and of those that are counted, and off after each."""
    real, begun = workspace._profiler(), []
    assert real is not None

    def begin() -> None:
        begun.append(1)
        real.begin()

    monkeypatch.setattr(workspace, "_profiler", lambda: real._replace(begin=begin))
    by_step: list[int] = []

    @contextlib.contextmanager
    def step(index: int) -> Iterator[None]:
        begun.clear()
        yield
        by_step.append(len(begun))
        assert not _profiler_enabled()

    _train("unet", _least_budget("unet"), step)
    recorded, verified, measured, *final = by_step
    assert recorded > 0
    assert verified > 0
    assert measured == 0
    assert final[2:] == [0] * (STEPS - 5)
