"""What a step drops of what is on the device beside it: plain training's own peak is a budget that is kept."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_offload import MemoryPlugin
from lightning_offload.capture.departures import within
from lightning_offload.errors import BudgetInfeasibleError
from lightning_offload.graph.step_graph import Departure
from tests.engine.live_tracker import LiveStorageTracker

NUM_STEPS = 7


Step = Callable[[nn.Module, Tensor], None]


def held_output() -> Step:
    """`out = model(x)`: the last one is there until there is another."""
    held: dict[str, Tensor] = {}

    def step(model: nn.Module, x: Tensor) -> None:
        held["out"] = model(x)
        held["out"].sigmoid().square().mean().backward()

    return step


def held_logits_and_loss() -> Step:
    """Both, and a metric of them."""
    held: dict[str, Tensor] = {}

    def step(model: nn.Module, x: Tensor) -> None:
        held["logits"] = model(x)
        held["loss"] = held["logits"].square().mean()
        held["loss"].backward()
        held["best"] = held["logits"].detach().argmax(1)

    return step


def dropped_at_once() -> Step:
    """Before the next forward."""
    held: dict[str, Tensor] = {}

    def step(model: nn.Module, x: Tensor) -> None:
        held.pop("out", None)
        held["out"] = model(x)
        held["out"].sin().square().mean().backward()

    return step


def dropped_in_backward() -> Step:
    """By a hook of a gradient."""
    held: dict[str, Tensor] = {}

    def step(model: nn.Module, x: Tensor) -> None:
        out = model(x)
        hidden = out.sigmoid()
        hidden.register_hook(lambda gradient: held.clear())
        hidden.square().mean().backward()
        held["out"] = out

    return step


def nothing_held() -> Step:
    """The usual training."""

    def step(model: nn.Module, x: Tensor) -> None:
        model(x).sigmoid().square().mean().backward()

    return step


LOOPS = [held_output, held_logits_and_loss, dropped_at_once, dropped_in_backward, nothing_held]


def _train(make: Callable[[], Step], memory: MemoryPlugin | None) -> tuple[list[bytes], list[int]]:
    """The parameters in the end, and the peak of each step as counted from outside."""
    gc.collect()
    gc.freeze()  # nobody is to count what others left
    torch.manual_seed(0)
    model, step, peaks = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 2000)), make(), []
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    with LiveStorageTracker() as tracker:
        for _ in range(NUM_STEPS):
            x = torch.randn(64, 16)
            tracker.register_all()
            with tracker.window() as window, memory.step(x) if memory is not None else contextlib.nullcontext():
                step(model, x)
            peaks.append(window.peak_bytes)
            optimizer.step()
            optimizer.zero_grad()
    return [p.detach().numpy().tobytes() for p in model.parameters()], peaks


@pytest.fixture(scope="module", autouse=True)
def links_are_measured() -> None:
    """Once in a process, with memory that is no step's; rates are those of so many threads as tests have."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with MemoryPlugin("64MiB", policy="all-swap") as memory:
        _train(nothing_held, memory)
    torch.set_num_threads(num_threads)


@pytest.mark.parametrize("make", LOOPS)
def test_plain_peaks_are_kept_and_predicted(make: Callable[[], Step]) -> None:
    """The budget of plain training's own peak is not refused, and is kept; its prediction is off by 1% at most."""
    expected, plain_peaks = _train(make, None)
    plain_peak = max(plain_peaks)
    with MemoryPlugin(plain_peak) as memory:
        trained, peaks = _train(make, memory)
        report = memory.report()
    assert trained == expected
    assert max(peaks) <= plain_peak
    assert report.phase == "planned"
    assert report.plain_peak_bytes == pytest.approx(plain_peaks[-1], rel=0.01)


@pytest.mark.parametrize("height", [0.0, 0.5])
@pytest.mark.parametrize("make", LOOPS)
def test_lower_budgets_are_kept(make: Callable[[], Step], height: float) -> None:
    """From the floor on."""
    expected, _ = _train(make, None)
    with MemoryPlugin("1GiB", policy="all-swap") as memory:
        _train(make, memory)
        report = memory.report()
    assert report.floor_bytes is not None
    assert report.plain_peak_bytes is not None
    budget = int(report.floor_bytes + height * (report.plain_peak_bytes - report.floor_bytes))
    with MemoryPlugin(budget) as memory:
        trained, peaks = _train(make, memory)
    assert trained == expected
    assert max(peaks) <= budget


def test_what_grows_is_not_taken_to_be_dropped() -> None:
    """Outputs that are kept for good: a budget that has room for one of them is refused once there are more."""
    kept: list[Tensor] = []

    def make() -> Step:
        def step(model: nn.Module, x: Tensor) -> None:
            kept.append(model(x))
            kept[-1].sigmoid().square().mean().backward()

        return step

    _, plain_peaks = _train(make, None)
    kept.clear()
    budget = plain_peaks[1]
    with MemoryPlugin(budget, policy="keep-all") as memory, pytest.raises(BudgetInfeasibleError) as caught:
        _train(make, memory)
    assert "other tensors" in str(caught.value)
    assert "(64, 2000)" in str(caught.value)


@pytest.mark.parametrize(
    ("num_bytes", "left"), [(30, {1: 10, 5: 20}), (25, {1: 10, 5: 15}), (5, {1: 5}), (0, {}), (99, {1: 10, 5: 20})]
)
def test_less_than_was_seen(num_bytes: int, left: dict[int, int]) -> None:
    """The larger part is taken to be gone."""
    seen = (Departure(tick=1, num_bytes=10), Departure(tick=5, num_bytes=20))
    found: Any = within(seen, num_bytes)
    assert {departure.tick: departure.num_bytes for departure in found} == left
