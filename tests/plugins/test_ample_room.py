"""Budgets with ample room: steps whose shape or structure is new run as without the plugin, with the same bits."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch import Tensor, nn

from lightning_offload import MemoryPlugin
from lightning_offload.capture.live import LiveScanClock
from lightning_offload.plugins.plain_steps import PlainNeed

CPU = torch.device("cpu")


class Dropping(nn.Module):
    """Leaves layers out at random."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))
        self.rng = random.Random(0)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.rng.random() > 0.2:
                x = x + layer(x).tanh()
        return x


def _train(memory: MemoryPlugin | None, *, lengths: bool, num_steps: int = 40) -> tuple[list[bytes], int]:
    """The parameters in the end, and how many steps had hooks."""
    torch.manual_seed(0)
    model, rng, num_hooked = Dropping(), random.Random(1), 0
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(num_steps):
        x = torch.randn(rng.randrange(8, 64) if lengths else 32, 32)
        if memory is None:
            model(x).square().mean().backward()
        else:
            with memory.step(x):
                num_hooked += torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
                model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().numpy().tobytes() for parameter in model.parameters()], num_hooked


@pytest.mark.parametrize("lengths", [False, True])
def test_few_steps_have_hooks(lengths: bool) -> None:
    """With the bits of plain training."""
    expected, _ = _train(None, lengths=lengths)
    with MemoryPlugin("1GiB") as memory:
        trained, num_hooked = _train(memory, lengths=lengths)
        report = memory.report()
    assert trained == expected
    assert 1 <= num_hooked <= 14
    assert report.num_steps == 40
    assert report.floor_bytes is not None
    assert report.plain_peak_bytes is not None
    assert 0 < report.floor_bytes < report.plain_peak_bytes


def test_ample_room_needs_no_second_listing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all tensors, which may take as long as many such steps."""
    monkeypatch.setattr(LiveScanClock, "is_due", lambda clock, share: False)
    with MemoryPlugin("1GiB") as memory:
        _train(memory, lengths=True)
        assert memory._steps.baseline.num_scans == 1


def test_reports_of_plain_steps_count_what_lies_beside_them() -> None:
    """A data set and the optimizer's state: the reported floor is a budget that is kept."""
    torch.manual_seed(0)
    model = Dropping()
    optimizer = torch.optim.Adam(model.parameters())

    def step(memory: MemoryPlugin, length: int) -> None:
        x = torch.randn(length, 32)
        with memory.step(x):
            model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    with MemoryPlugin("1GiB") as memory:
        data = torch.zeros(1 << 18)
        for length in (64, 50, 40, 30, 20, 60):
            step(memory, length)
        report = memory.report()
    assert report.floor_bytes is not None
    assert report.floor_bytes > data.nbytes + 3 * sum(p.nbytes for p in model.parameters())


@pytest.mark.parametrize("lengths", [False, True])
def test_a_tight_budget_has_them_all_hooked(lengths: bool) -> None:
    """Where there is no room for it no step goes plainly."""
    with MemoryPlugin("1GiB", policy="all-swap") as memory:
        _train(memory, lengths=lengths)
        report = memory.report()
    assert report.plain_peak_bytes is not None
    expected, _ = _train(None, lengths=lengths)
    with MemoryPlugin(f"{report.plain_peak_bytes}B") as memory:
        trained, num_hooked = _train(memory, lengths=lengths)
    assert trained == expected
    assert num_hooked >= 30


def test_steps_are_watched_in_growing_distances() -> None:
    """And soon again once one needed much more than any before."""
    need, watched = PlainNeed(), []
    need.learn(1000, 10)
    for step in range(200):
        need.begin_step()
        if not need.fits(CPU, 3000):
            watched.append(step)
            need.learn(1000, 10)
    gaps = [later - earlier for earlier, later in itertools.pairwise(watched)]
    assert gaps == sorted(gaps)
    assert gaps[-1] > 30
    need.learn(1200, 10)
    assert need.patience == 1
    assert not need.fits(CPU, 1500)


def test_room_is_for_several_times_what_others_needed() -> None:
    """By the square of the size."""
    need = PlainNeed()
    assert not need.fits_amply(CPU, 1 << 30, 1.0)
    need.learn(1000, 10)
    assert need.fits_amply(CPU, 4010, 1.0)
    assert not need.fits_amply(CPU, 4009, 1.0)
    assert need.fits_amply(CPU, 16_010, 2.0)
    assert not need.fits_amply(CPU, 16_009, 2.0)
